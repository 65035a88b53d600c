"""What users are told of claims, MIG devices and MIG modes, and what a claim's state is remembered by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra_driver.errors import DeviceBusyError, StateError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.claim_status import ClaimStatusReporter
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.node_events import MpsEvents
from dra_driver.reporting.reporter import Reporter
from tests.fakes.samples import GPU_0, claim, h100, hold, inventory
from tests.fakes.tables import tabled

REF = ClaimRef("default", "claim", "uid-1")
RECORD = ClaimRecord(claim(GPU_0), "prepared", "boot-1", (hold(GPU_0),), ())
SECOND = replace(RECORD, claim=claim(GPU_0, uid="uid-2"))
OTHER = replace(RECORD, devices=(hold(GPU_0, uuid="GPU-9"),))


class Listener:
    """Metrics and recorder: what came, in order; states with what says that they were written."""

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.counted: list[tuple] = []
        self.states: list[tuple] = []
        self.firsts: list[bool] = []

    def claim_event(self, ref, reason, message, *, warning):
        self.told.append(("claim and pods", reason, message, warning))

    def minor_claim_event(self, ref, reason, message):
        self.told.append(("claim, minor", reason, message, False))

    def node_event(self, reason, message, *, warning, minor=False):
        self.told.append(("node, minor" if minor else "node", reason, message, warning))

    def claim_gone(self, ref):
        pass

    def claim_status(self, ref, devices, written, *, is_first=False):
        self.states.append((devices, written))
        self.firsts.append(is_first)

    def prepared(self, duration_s, error): ...

    def unprepared(self, duration_s, error): ...

    def mig_changed(self, action, duration_s, error):
        self.counted.append((action, duration_s, error))


@pytest.fixture
def heard():
    return Listener()


@pytest.fixture
def freed():
    return []


@pytest.fixture
def reporter(heard, freed):
    return Reporter(
        heard,
        heard,
        states_for(heard),
        lambda device: None,
        lambda device: REF if device == "known" else None,
        lambda: freed.append("claim"),
        no_mps(heard),
        FailingClaims(("", ""), lambda ref, timeout_s: None, lambda ref, seconds: None, lambda uid: None),
    )


def test_claim_that_fails_is_remembered_until_a_call_for_it_succeeds(reporter):
    told = f"prepare claim {REF.namespace}/{REF.name} (UID {REF.uid}): the disk is full"
    reporter.failed("prepare", REF, 0.1, StateError("the disk is full"), told)
    [failing] = reporter.failing.all()
    assert (failing.ref, failing.operation, failing.count, failing.error) == (
        REF,
        "prepare",
        1,
        "the disk is full",
    )
    reporter.prepared(REF, 0.1, None)
    assert reporter.failing.all() == ()
    reporter.failed("unprepare", REF, 0.1, StateError("the disk is full"), "unprepare it: the disk is full")
    assert [one.operation for one in reporter.failing.all()] == ["unprepare"]
    reporter.unprepared(REF, 0.1)
    assert reporter.failing.all() == ()


def named_by_api(record, *devices):
    """The record with what the API server says that the claim's status names."""
    return replace(record, claim=replace(record.claim, reported=frozenset(devices)))


def test_a_state_that_was_removed_from_the_claim_is_given_again_by_the_next_prepare(reporter, heard):
    entry = ("gpu.nvidia.com", "node-a", GPU_0, None)
    removed, there = named_by_api(RECORD), named_by_api(RECORD, entry)
    reporter.prepared(REF, 0.1, removed)
    heard.states[-1][1]()
    for record, states in ((there, 1), (RECORD, 1), (removed, 2)):
        reporter.prepared(REF, 0.1, record)
        assert len(heard.states) == states
    assert heard.firsts == [True, False], "only the first time nothing needs to be read before the write"


def test_a_state_is_given_again_after_a_look_only_if_it_was_removed(heard):
    states = states_for(heard, {"uid-1": RECORD})
    states.renew("uid-1", frozenset({("gpu.nvidia.com", "node-a", GPU_0, None)}))
    assert heard.states == [], "also by an instance that did not write it"
    states.renew("uid-1", frozenset())
    assert len(heard.states) == 1


def no_mps(recorder):
    return MpsEvents(recorder, dict, tuple)


def states_for(recorder, records=None):
    known = inventory(h100(0))
    return ClaimStatusReporter(recorder, lambda: known, lambda device: None, dict, (records or {}).get)


def test_a_state_is_given_again_until_it_was_written(reporter, heard):
    for _ in range(2):
        reporter.prepared(REF, 0.1, RECORD)
    assert len(heard.states) == 2
    heard.states[-1][1]()
    reporter.prepared(REF, 0.1, RECORD)
    assert len(heard.states) == 2, "the same state is written once"
    reporter.prepared(REF, 0.1, OTHER)
    assert len(heard.states) == 3
    heard.states[-2][1]()
    reporter.prepared(REF, 0.1, OTHER)
    assert len(heard.states) == 4, "what was written is another state"


def test_a_state_that_is_written_after_the_claim_is_gone_counts_for_nothing(reporter, heard, freed):
    reporter.prepared(REF, 0.1, RECORD)
    reporter.unprepared(REF, 0.1)
    assert freed == ["claim"]
    heard.states[0][1]()
    reporter.prepared(REF, 0.1, RECORD)
    assert len(heard.states) == 2


@tabled("action", "subject", "error", "told")
def test_mig_is_told_and_counted(reporter, heard, action, subject, error, told):
    cause = None if error is None else DeviceBusyError(error)
    reporter.mig_changed(action, subject, 1.5, cause)
    assert heard.told == ([] if told is None else [(*told, error is not None)])
    assert heard.counted == [(action, 1.5, cause)]


def test_a_state_is_renewed_when_it_is_another_or_was_not_written(heard):
    records = {"uid-1": RECORD, "uid-2": replace(SECOND, phase="preparing")}
    states = states_for(heard, records)
    for uid in ("uid-1", "uid-2", "uid-3"):
        states.renew(uid)
    assert len(heard.states) == 1, "what is not prepared has no state"
    states.renew("uid-1")
    assert len(heard.states) == 2, "it may have been lost"
    heard.states[-1][1]()
    states.renew("uid-1")
    assert len(heard.states) == 2
    records["uid-1"] = OTHER
    states.renew("uid-1")
    assert len(heard.states) == 3


def test_claim_that_a_process_keeps_is_told_of_on_the_node(reporter, heard):
    reporter.still_in_use(REF, "was deleted, but process 4711 still computes on gpu-0")
    [(kind, reason, message, warning)] = heard.told
    assert (kind, reason, warning) == ("node", "ClaimStillInUse", True)
    assert message == f"Claim {REF} was deleted, but process 4711 still computes on gpu-0"
