"""Reports about claims, MIG devices and MIG modes, and how a claim's status is remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra_driver.errors import DeviceBusyError, StateError
from dra_driver.model.claim import ClaimRef, PodRef
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsShared
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, StartMaintenance
from dra_driver.reporting.claim_status import ClaimStatusReporter
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.reporter import MpsClaims, Reporter
from tests.fakes.samples import GPU_0, GPU_1, claim, h100, hold, inventory, uuid
from tests.fakes.tables import tabled

REF = ClaimRef("default", "claim", "uid-1")
RECORD = ClaimRecord(claim(GPU_0), "prepared", "boot-1", (hold(GPU_0),), ())
SECOND = replace(RECORD, claim=claim(GPU_0, uid="uid-2"))
OTHER = replace(RECORD, devices=(hold(GPU_0, uuid="GPU-9"),))


class Listener:
    """Metrics and recorder: records the reports in order; statuses with their callback for a successful
    write.
    """

    def __init__(self) -> None:
        self.reports: list[tuple] = []
        self.counted: list[tuple] = []
        self.states: list[tuple] = []
        self.firsts: list[bool] = []

    def claim_event(self, ref, reason, message, *, warning):
        self.reports.append(("claim and pods", reason, message, warning))

    def minor_claim_event(self, ref, reason, message):
        self.reports.append(("claim, minor", reason, message, False))

    def node_event(self, reason, message, *, warning, minor=False):
        self.reports.append(("node, minor" if minor else "node", reason, message, warning))

    def claim_gone(self, ref):
        pass

    def claim_status(self, ref, devices, written, *, is_first=False):
        self.states.append((devices, written))
        self.firsts.append(is_first)

    def ended(self, operation, duration_s, error=None): ...

    def mig_changed(self, action, duration_s, error):
        self.counted.append((action, duration_s, error))


@pytest.fixture
def received():
    return Listener()


@pytest.fixture
def freed():
    return []


@pytest.fixture
def reporter(received, freed):
    return Reporter(
        received,
        received,
        states_for(received),
        lambda device: None,
        lambda device: REF if device == "known" else None,
        lambda: freed.append("claim"),
        FailingClaims(("", ""), lambda ref, timeout_s: None, lambda ref, seconds: None, lambda uid: None),
    )


def test_claim_that_fails_is_remembered_until_a_call_for_it_succeeds(reporter):
    reports = f"cannot prepare claim {REF.namespace}/{REF.name} (UID {REF.uid}): the disk is full"
    reporter.failed("prepare", REF, 0.1, StateError("the disk is full"), reports)
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
    reporter.unprepared(REF, 0.1, RECORD)
    assert reporter.failing.all() == ()


def test_maintenance_claim_has_events_when_it_begins_and_ends(reporter, received):
    record = replace(RECORD, steps=(StartMaintenance((uuid(0), uuid(1)), "Wait", 900),))
    reporter.prepared(REF, 0.1, record)
    reporter.unprepared(REF, 0.1, record)
    reporter.unprepared(REF, 0.1, replace(record, phase="preparing"))  # it waited, and never began
    gpus = f"{uuid(0)}, {uuid(1)}: "
    assert received.reports == [
        ("claim and pods", "MaintenanceStarted", f"{gpus}in maintenance for this claim", False),
        (
            "claim and pods",
            "MaintenanceEnded",
            f"{gpus}maintenance ended; gpu-dra-driver publishes the devices again",
            False,
        ),
    ]


def named_by_api(record, *devices):
    """The record with what the API server says that the claim's status names."""
    return replace(record, claim=replace(record.claim, reported=frozenset(devices)))


def test_a_state_that_was_removed_from_the_claim_is_given_again_by_the_next_prepare(reporter, received):
    entry = ("gpu.nvidia.com", "node-a", GPU_0, None)
    removed, there = named_by_api(RECORD), named_by_api(RECORD, entry)
    reporter.prepared(REF, 0.1, removed)
    received.states[-1][1]()
    for record, states in ((there, 1), (RECORD, 1), (removed, 2)):
        reporter.prepared(REF, 0.1, record)
        assert len(received.states) == states
    assert received.firsts == [True, False], "only the first time nothing needs to be read before the write"


def test_a_state_is_given_again_after_a_check_only_if_it_was_removed(received):
    states = states_for(received, {"uid-1": RECORD})
    states.renew("uid-1", frozenset({("gpu.nvidia.com", "node-a", GPU_0, None)}))
    assert received.states == [], "also by an instance that did not write it"
    states.renew("uid-1", frozenset())
    assert len(received.states) == 1


def states_for(recorder, records=None):
    known = inventory(h100(0))
    return ClaimStatusReporter(recorder, lambda: known, lambda device: None, dict, (records or {}).get)


def test_a_state_is_given_again_until_it_was_written(reporter, received):
    for _ in range(2):
        reporter.prepared(REF, 0.1, RECORD)
    assert len(received.states) == 2
    received.states[-1][1]()
    reporter.prepared(REF, 0.1, RECORD)
    assert len(received.states) == 2, "the same state is written once"
    reporter.prepared(REF, 0.1, OTHER)
    assert len(received.states) == 3
    received.states[-2][1]()
    reporter.prepared(REF, 0.1, OTHER)
    assert len(received.states) == 4, "what was written is another state"


def test_a_state_that_is_written_after_the_claim_is_gone_counts_for_nothing(reporter, received, freed):
    reporter.prepared(REF, 0.1, RECORD)
    reporter.unprepared(REF, 0.1, RECORD)
    assert freed == ["claim"]
    received.states[0][1]()
    reporter.prepared(REF, 0.1, RECORD)
    assert len(received.states) == 2


@tabled("action", "subject", "error", "reports")
def test_mig_is_reported_and_counted(reporter, received, action, subject, error, reports):
    cause = None if error is None else DeviceBusyError(error)
    reporter.mig_changed(action, subject, 1.5, cause)
    assert received.reports == ([] if reports is None else [(*reports, error is not None)])
    assert received.counted == [(action, 1.5, cause)]


def test_a_state_is_renewed_when_it_is_another_or_was_not_written(received):
    records = {"uid-1": RECORD, "uid-2": replace(SECOND, phase="preparing")}
    states = states_for(received, records)
    for uid in ("uid-1", "uid-2", "uid-3"):
        states.renew(uid)
    assert len(received.states) == 1, "what is not prepared has no state"
    states.renew("uid-1")
    assert len(received.states) == 2, "it may have been lost"
    received.states[-1][1]()
    states.renew("uid-1")
    assert len(received.states) == 2
    records["uid-1"] = OTHER
    states.renew("uid-1")
    assert len(received.states) == 3


def test_claim_that_a_process_keeps_is_reported_on_the_node(reporter, received):
    reporter.still_in_use(REF, "was deleted, but process 4711 still uses gpu-0")
    [(kind, reason, message, warning)] = received.reports
    assert (kind, reason, warning) == ("node", "ClaimStillInUse", True)
    assert message == f"Claim {REF} was deleted, but process 4711 still uses gpu-0"


SPEC = MpsDaemonSpec(GPU_0, uuid(0), "gpu", uuid(0))
READY = MpsDaemonStatus(GPU_0, "ready", SPEC, pid=1)
ALONE = f"the compute mode EXCLUSIVE_PROCESS is not available on GPU {uuid(0)}: a program that does not reach"
USERS = f"processes of the users 0, 1000 use the MPS daemon of {GPU_0}, which serves one user at a time"


class Node:
    """Claims with MPS and their daemons."""

    def __init__(self) -> None:
        self.records: dict[str, ClaimRecord] = {}
        self.daemons: tuple[MpsDaemonStatus, ...] = ()
        self.requested = 0
        self.advised: list[str] = []
        self.claims = MpsClaims(self, lambda: self.records, self.ask)  # type: ignore[arg-type]

    def ask(self) -> tuple[MpsDaemonStatus, ...]:
        self.requested += 1
        return self.daemons

    def minor_claim_event(self, ref: ClaimRef, reason: str, message: str) -> None:
        assert reason == "MpsNeedsRequestNames"
        self.advised.append(ref.uid)

    def use(self, uid: str, spec: MpsDaemonSpec = SPEC) -> None:
        one = claim(uid=uid)
        self.records[uid] = ClaimRecord(one, "prepared", "boot", (), (RunMps(spec),))

    def look(self) -> list[NodeProblem]:
        return list(self.claims.problems())


def test_no_one_is_queried_when_no_claim_uses_mps() -> None:
    node = Node()
    node.daemons = (replace(READY, users=(0, 1000)),)
    assert (node.look(), node.requested) == ([], 0)


def test_each_problem_of_a_daemon_is_one_of_its_claims() -> None:
    node = Node()
    node.use("a")
    node.use("b")
    node.use("c", replace(SPEC, device="gpu-other"))
    assert node.look() == []
    node.daemons = (replace(READY, users=(0, 1000), not_exclusive=(uuid(0),)),)
    found = node.look()
    assert [(one.code, one.subject, [ref.uid for ref in one.claims]) for one in found] == [
        ("mps-not-exclusive", GPU_0, ["a", "b"]),
        ("mps-users-wait", GPU_0, ["a", "b"]),
    ]
    assert [one.text.startswith(text) for one, text in zip(found, (ALONE, USERS), strict=True)] == [
        True,
        True,
    ]


def test_claims_with_mps_of_one_pod_are_advised_once_when_the_second_is_prepared() -> None:
    node = Node()
    pods = (PodRef("pod", "pod-1"),)

    def prepare(uid: str, device: str, usage: MpsShared | None) -> None:
        one = replace(claim(device, uid=uid), pods=pods)
        steps = () if usage is None else (RunMps(usage.spec),)
        node.records[uid] = ClaimRecord(one, "prepared", "boot", (hold(device, usage=usage),), steps)

    prepare("a", GPU_0, MpsShared(SPEC))
    node.look()
    assert node.advised == []
    prepare("b", GPU_1, None)
    for _ in range(2):
        node.look()
        assert node.advised == ["a"]


def test_nothing_is_a_problem_when_users_are_alike_or_served_at_once() -> None:
    node = Node()
    node.use("a")
    node.daemons = (replace(READY, users=(1000,)),)
    assert node.look() == []
    node.daemons = (replace(READY, spec=replace(SPEC, multi_user=True), users=(0, 1000)),)
    assert node.look() == []
