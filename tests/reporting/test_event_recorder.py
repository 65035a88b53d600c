"""Which events users see, how often, and what becomes of them when the API server is busy, away or says no."""

from __future__ import annotations

import re
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.model.claim import ClaimRef, DeviceStatus
from dra_driver.model.problems import EventObject, EventReason, node_object
from dra_driver.reporting.event_recorder import (
    ClaimState,
    EventQueue,
    EventRecorder,
    ObjectEvent,
    ReportLimits,
)
from tests.fakes.waiting import PATIENCE_S, eventually

_REF = ClaimRef("ns", "claim", "uid")
_PODS = tuple(EventObject("Pod", f"pod-{n}", f"uid-{n}", "ns") for n in range(2))
_READY = DeviceStatus("n", "gpu-0", True, "Prepared", "")
_LOST = DeviceStatus("n", "gpu-0", False, "GPULost", "fell off the bus")
_FAST = ReportLimits(
    events_per_s=1000, statuses_per_s=1000, again_s=0, backoff_first_s=0.001, backoff_most_s=0.01
)


class Server:
    """Events and claims that accept reports when `open` is set, or raise the next of `errors`."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.errors = []
        self.refuses_pods = False
        self.events = []
        self.states = []
        self.firsts = []
        self.tries = 0
        self.reported = threading.Condition()

    def pods_of(self, ref):
        self._serve()
        if self.refuses_pods:
            raise ApiRejectedError("get claim: forbidden", status=403)
        return _PODS

    def write(self, about, *rest, **how):
        self.firsts.append(how.get("is_first"))
        self._serve()
        with self.reported:
            if isinstance(about, ClaimRef):
                self.states.append((about, *rest))
            else:
                self.events.append((about.kind, about.name, *rest, how["warning"], how["times"]))
            self.reported.notify_all()
        return True

    def _serve(self) -> None:
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        with self.reported:
            self.tries += 1
            if self.errors:
                raise self.errors.pop(0)

    def wait_for(self, condition) -> None:
        with self.reported:
            assert self.reported.wait_for(condition, PATIENCE_S)


@pytest.fixture
def server():
    return Server()


@contextmanager
def speaking(server, limits=_FAST):
    recorder = EventRecorder("node-a", server, server, limits=limits)
    recorder.start()
    try:
        yield recorder
    finally:
        server.open.set()
        recorder.stop()


def said(server):
    """(kind, name) of what had events."""
    return sorted((kind, name) for kind, name, *_ in server.events)


def test_an_event_for_a_claim_is_on_its_pods_too(server):
    with speaking(server) as recorder:
        recorder.claim_event(_REF, "PrepareFailed", "why", warning=True)
        server.wait_for(lambda: len(server.events) == 3)
    assert server.events == [
        (kind, name, "PrepareFailed", "why", True, 1)
        for kind, name in (("ResourceClaim", "claim"), ("Pod", "pod-0"), ("Pod", "pod-1"))
    ]
    assert (recorder.written, recorder.dropped, recorder.failed) == (3, 0, 0)


def test_an_event_for_the_node_and_the_newest_state_of_a_claim_are_written(server):
    server.open.clear()
    with speaking(server) as recorder:
        recorder.node_event("GPURecovered", "GPU gpu-0 is well", warning=False)
        assert server.entered.wait(PATIENCE_S)
        for devices in ((_LOST,), (_READY, _LOST), (_READY,)):
            recorder.claim_status(_REF, devices, lambda: None)
        server.open.set()
        server.wait_for(lambda: server.states and server.events)
    assert server.events == [("Node", "node-a", "GPURecovered", "GPU gpu-0 is well", False, 1)]
    assert server.states == [(_REF, (_READY,))]


def test_a_speaker_never_waits_and_a_burst_is_bounded(server):
    server.open.clear()  # the API server hangs
    with speaking(server, ReportLimits(most=100, events_per_s=0.01)) as recorder:
        recorder.node_event("First", "", warning=False)
        assert server.entered.wait(PATIENCE_S)
        for number in range(1000):
            recorder.claim_event(_REF, "PrepareFailed", f"cause {number}", warning=True)
        assert recorder.dropped == 900
        assert (recorder.written, server.tries) == (0, 0)
    assert server.tries == ReportLimits().events_at_once


def test_a_server_that_comes_back_gets_everything_once(server):
    """The last error is that of a token that was renewed too late, or of a new key that the server lacks."""
    server.errors = [
        ApiUnavailableError("down"),
        ApiUnavailableError("busy", retry_after_s=0.02),
        ApiRejectedError("unauthorized", status=401),
    ] * 2
    with speaking(server) as recorder:
        recorder.claim_event(_REF, "PrepareFailed", "why", warning=True)
        recorder.claim_status(_REF, [_READY], lambda: None)
        server.wait_for(lambda: len(server.events) == 3 and server.states)
    assert said(server) == [("Pod", "pod-0"), ("Pod", "pod-1"), ("ResourceClaim", "claim")]
    assert server.tries == 6 + 1 + 3 + 1
    assert (recorder.written, recorder.dropped, recorder.failed) == (4, 0, 0)


def test_report_that_cannot_be_sent_for_minutes_is_dropped(server, logs):
    server.errors = [ApiUnavailableError("down")] * 50
    with speaking(
        server, ReportLimits(backoff_first_s=0.001, backoff_most_s=0.001, give_up_s=0.0)
    ) as recorder:
        recorder.node_event("Old", "", warning=False)
        eventually(lambda: recorder.dropped)
        with server.reported:
            server.errors.clear()
        recorder.node_event("New", "", warning=False)
        server.wait_for(lambda: server.events)
    assert [event[2] for event in server.events] == ["New"]
    assert recorder.dropped == 1
    assert "notices_delayed" in {line["event"] for line in logs}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ApiRejectedError("forbidden", status=403),
            [("notice_refused", "warning"), ("notice_refused", "debug")],
        ),
        (ZeroDivisionError("a bug"), [("worker_failed", "error")] * 2),
    ],
)
def test_a_refusal_or_a_bug_costs_one_notice(server, logs, error, expected):
    with speaking(server) as recorder:
        for reason in ("First", "Second"):
            server.errors = [error]
            recorder.node_event(reason, "", warning=False)
            eventually(lambda: not server.errors)
        recorder.node_event("Third", "", warning=False)
        server.wait_for(lambda: server.events)
        eventually(lambda: recorder.failed == 2)
        eventually(lambda: len(logs) == 2)
    assert [event[2] for event in server.events] == ["Third"]
    assert [(line["event"], line["log_level"]) for line in logs] == expected


def test_a_claim_that_may_not_be_read_still_gets_its_event(server):
    server.refuses_pods = True
    with speaking(server) as recorder:
        recorder.claim_event(_REF, "PrepareFailed", "why", warning=True)
        server.wait_for(lambda: server.events)
        assert said(server) == [("ResourceClaim", "claim")]
    assert recorder.failed == 1


def test_a_stop_says_what_is_held_back_and_then_nothing_more(server):
    with speaking(server, ReportLimits(again_s=3600)) as recorder:
        for _ in range(2):
            recorder.node_event("SlicesNotPublished", "forbidden", warning=True)
            server.wait_for(lambda: server.events)
    recorder.node_event("Late", "", warning=False)
    recorder.stop()
    assert [(event[2], event[5]) for event in server.events] == [("SlicesNotPublished", 1)] * 2
    assert recorder.dropped == 1


def test_a_first_state_that_may_have_been_stored_is_checked_before_it_is_written_again(server):
    server.errors = [ApiUnavailableError("no answer")]
    with speaking(server, _FAST) as recorder:
        recorder.claim_status(_REF, [_READY], lambda: None, is_first=True)
        server.wait_for(lambda: server.states)
    assert server.firsts == [True, False]


def test_a_stop_drops_what_the_api_server_does_not_take(server):
    server.errors = [ApiUnavailableError("down")]
    with speaking(server, ReportLimits(backoff_first_s=3600, backoff_most_s=3600)) as recorder:
        recorder.node_event("First", "", warning=False)
        eventually(lambda: not server.errors)
        recorder.claim_status(_REF, [_READY], lambda: None)
    assert (server.events, server.states, recorder.dropped) == ([], [], 2)


def test_a_recorder_that_was_never_started_stops(server):
    recorder = EventRecorder("node-a", server, server)
    recorder.node_event("First", "", warning=False)
    recorder.stop()
    assert recorder.dropped == 1


def claim_state(ref, *devices):
    return ClaimState(ref, devices, lambda: None)


def event(number, about="node-a"):
    return ObjectEvent(node_object(about), "Reason", str(number), warning=False)


def taken(queue, now, **how):
    """All that may be said now."""
    found = []
    while (queued := queue.take(now, **how)) is not None:
        found.append(queued)
    return found


def test_the_pace_is_a_burst_and_then_one_a_second():
    queue = EventQueue(ReportLimits())
    for number in range(40):
        queue.put(event(number), 0.0)
    assert len(taken(queue, 0.0)) == 25
    assert queue.ready_at(0.0) == pytest.approx(1.0)
    assert len(taken(queue, 0.5)) == 0
    assert len(taken(queue, 3.0)) == 3
    assert len(taken(queue, 3600.0)) == 12
    assert queue.ready_at(3600.0) is None


def test_a_state_lets_calls_that_came_together_be_answered_first():
    """It is counted from the first: one that changes all the time is said as well."""
    queue = EventQueue(ReportLimits(settle_s=0.25))
    queue.put(claim_state(_REF, _LOST), 5.0)
    queue.put(claim_state(_REF, _READY), 5.125)
    assert (taken(queue, 5.125), queue.ready_at(5.125)) == ([], 5.25)
    assert [queued.report.devices for queued in taken(queue, 5.25)] == [(_READY,)]
    queue.put(claim_state(_REF, _LOST), 6.0)
    assert [queued.report.devices for queued in taken(queue, 6.0, hurry=True)] == [(_LOST,)]


def test_the_same_event_is_said_once_a_minute_with_its_number():
    queue = EventQueue(ReportLimits())
    counts = []
    for second in range(150):
        queue.put(event(0), float(second))
        counts += [(second, queued.times) for queued in taken(queue, float(second))]
    assert counts == [(0, 1), (60, 60), (120, 60)]
    assert queue.ready_at(150.0) == 180.0
    assert [queued.times for queued in taken(queue, 150.0, hurry=True)] == [29]


def test_a_pause_holds_everything_back():
    queue = EventQueue(ReportLimits())
    queue.put(event(0), 0.0)
    queue.pause(7.0)
    assert (taken(queue, 6.9, hurry=True), queue.ready_at(6.9)) == ([], 7.0)
    assert len(taken(queue, 7.0)) == 1


def test_a_notice_that_failed_comes_first_and_takes_later_ones_in():
    queue = EventQueue(ReportLimits(settle_s=0))
    queue.put(event(0), 0.0)
    failed = queue.take(0.0)
    queue.put(event(1), 1.0)
    queue.put(event(0), 1.0)
    queue.put_first(failed)
    assert [(queued.report.message, queued.times) for queued in taken(queue, 2.0)] == [("0", 2), ("1", 1)]
    queue.put(claim_state(_REF, _LOST), 3.0)
    failed = queue.take(3.0)
    queue.put(claim_state(_REF, _READY), 3.0)
    queue.put_first(failed)
    assert [queued.report.devices for queued in taken(queue, 3.0)] == [(_READY,)]


def test_expired_event_is_dropped():
    queue = EventQueue(ReportLimits())
    for second in range(5):
        queue.put(event(second), float(second))
    assert queue.forget_due_before(3.0) == 3
    assert [queued.report.message for queued in taken(queue, 5.0)] == ["3", "4"]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40)), max_size=60), st.integers(1, 6))
def test_nothing_is_lost_but_what_was_counted(steps, most):
    queue = EventQueue(ReportLimits(most=most, events_at_once=3, again_s=20))
    now, put, lost, got = 0.0, Counter(), 0, Counter()
    for number, wait in steps:
        now += wait
        put[str(number)] += 1
        lost += len(queue.put(event(number), now))
        assert len(queue) <= most
        for queued in taken(queue, now) if wait % 3 == 0 else ():
            got[queued.report.message] += queued.times
    for _ in range(9):
        now += 60
        for queued in taken(queue, now):
            got[queued.report.message] += queued.times
    assert len(queue) == 0
    assert all(got[name] <= put[name] for name in put)
    if not lost:
        assert got == put


def minor(number):
    return ObjectEvent(node_object("node-a"), "Minor", str(number), warning=False, minor=True)


def test_least_important_report_is_dropped_first_and_sent_last():
    queue = EventQueue(ReportLimits(most=3))
    state = claim_state(_REF, _READY)
    given = [state, minor(0), event(0), minor(1), event(1), event(2), claim_state(ClaimRef("ns", "b", "b"))]
    gone = [report for entry in given for report in queue.put(entry, 0.0)]
    assert gone == [minor(0), minor(1), event(0), event(1)]
    queue = EventQueue(ReportLimits(events_at_once=2, settle_s=0))
    for entry in (minor(0), minor(1), event(0), state):
        queue.put(entry, 0.0)
    assert [queued.report for queued in taken(queue, 0.0)] == [event(0), state, minor(0)]


def test_a_burst_of_minor_events_costs_nothing_else(server, logs):
    server.open.clear()
    with speaking(server, ReportLimits(most=10, events_per_s=1000, settle_s=0)) as recorder:
        recorder.node_event("First", "", warning=False)
        assert server.entered.wait(PATIENCE_S)
        recorder.claim_status(_REF, [_READY], lambda: None)
        recorder.claim_event(_REF, "PrepareFailed", "why", warning=True)
        for number in range(500):
            recorder.minor_claim_event(_REF, "MigDeviceCreated", str(number))
        assert recorder.dropped == 0
        server.open.set()
        server.wait_for(lambda: len(server.events) == 12 and server.states)
    assert [kind for kind, _, reason, *_ in server.events if reason == "MigDeviceCreated"] == [
        "ResourceClaim"
    ] * 8
    assert [reason for _, _, reason, *_ in server.events[1:4]] == ["PrepareFailed"] * 3
    assert "notices_dropped" not in {line["event"] for line in logs}


def test_a_state_outlives_an_outage_and_reports_when_it_was_written(server):
    server.errors = [ApiUnavailableError("down")] * 20
    written = threading.Event()
    with speaking(
        server, ReportLimits(backoff_first_s=0.001, backoff_most_s=0.001, give_up_s=0.0)
    ) as recorder:
        recorder.claim_status(_REF, [_READY], written.set)
        assert written.wait(PATIENCE_S)
    assert (server.states, recorder.dropped) == ([(_REF, (_READY,))], 0)


def test_a_state_that_was_refused_does_not_count_as_written(server):
    server.errors = [ApiRejectedError("forbidden", status=403)]
    written = []
    with speaking(server) as recorder:
        recorder.claim_status(_REF, [_READY], lambda: written.append("refused"))
        eventually(lambda: recorder.failed)
        recorder.claim_status(_REF, [_READY], lambda: written.append("taken"))
        server.wait_for(lambda: server.states)
    assert written == ["taken"]


def test_the_state_of_a_claim_that_is_gone_is_not_written_any_more(server):
    server.open.clear()
    with speaking(server) as recorder:
        recorder.node_event("PrepareFailed", "keeps the recorder busy", warning=True)
        assert server.entered.wait(PATIENCE_S)
        recorder.claim_status(_REF, [], lambda: None)
        recorder.claim_gone(_REF)
        server.open.set()
        server.wait_for(lambda: len(server.events) == 1)
    assert server.states == []


PAGE = Path(__file__).parents[2] / "docs/events.md"


def test_page_lists_every_reason_of_an_event() -> None:
    table = PAGE.read_text().partition("<!-- events -->\n")[2].partition("<!-- end of events -->")[0]
    listed = re.findall(r"^\| `(\w+)` \| ", table, re.MULTILINE)
    assert len(listed) > 20
    listed += re.findall(r"`(\w+)`", table.partition("a Normal event:")[2].partition("\n")[0])
    assert sorted(listed) == sorted({*get_args(EventReason)} - {"Prepared"})  # used only for a condition
