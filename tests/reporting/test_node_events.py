"""Node events of publishing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra_driver.errors import ApiUnavailableError, RetryableError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.model.record import ClaimRecord, RunMps
from dra_driver.reporting.node_events import MpsEvents, NodeEvents
from tests.fakes.samples import GPU_0, claim, uuid
from tests.fakes.waiting import eventually


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []
        self.texts: list[str] = []
        self.counted: list[object] = []

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((reason, warning))
        self.texts.append(message)

    def published(self, lag_s: float) -> None:
        self.counted.append(lag_s)

    def publish_failed(self, error: Exception) -> None:
        self.counted.append(error)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def news(told: Told) -> NodeEvents:
    return NodeEvents(told, told, lambda: True)


def test_writes_of_slices_are_counted_and_need_no_event(news: NodeEvents, told: Told) -> None:
    error = ApiUnavailableError("no answer")
    news.publish_failed(error)
    news.published(0.5)
    assert (told.counted, told.events) == ([error, 0.5], [])


def test_what_is_wrong_with_slices_is_told(news: NodeEvents, told: Told) -> None:
    news.contested("a second publisher")
    news.device_left_out("device gpu-1: too many attributes")
    news.fields_dropped("DRADeviceTaints")
    assert [reason for reason, _ in told.events] == [
        "SlicesContested",
        "DeviceNotPublished",
        "SliceFieldsDropped",
    ]
    assert "DRADeviceTaints" in told.texts[-1]


def test_what_is_another_instances_turn_to_tell_is_not_told(told: Told) -> None:
    is_ours = False
    news = NodeEvents(told, told, lambda: is_ours)
    news.contested("fight")
    assert told.events == []
    is_ours = True
    news.contested("fight")
    assert told.events == [("SlicesContested", True)]


SPEC = MpsDaemonSpec(GPU_0, uuid(0), "gpu", uuid(0))
READY = MpsDaemonStatus(GPU_0, "ready", SPEC, pid=1)
ALONE = f"GPU {uuid(0)} does not support the compute mode EXCLUSIVE_PROCESS: a program that does not reach"
USERS = f"processes of the users 0, 1000 have the MPS daemon of {GPU_0}, which serves one user at a time"


class Node:
    """Claims with MPS, their daemons, and what was told."""

    def __init__(self) -> None:
        self.records: dict[str, ClaimRecord] = {}
        self.daemons: tuple[MpsDaemonStatus, ...] = ()
        self.asked = 0
        self.told: list[tuple[str, str, str]] = []
        self.events = MpsEvents(self, lambda: self.records, self.ask)  # type: ignore[arg-type]

    def ask(self) -> tuple[MpsDaemonStatus, ...]:
        self.asked += 1
        if not self.daemons:
            raise RetryableError("no MPS host listens")
        return self.daemons

    def claim_event(self, ref: ClaimRef, reason: str, message: str, *, warning: bool) -> None:
        assert warning
        self.told.append((ref.uid, reason, message))

    def use(self, uid: str, spec: MpsDaemonSpec = SPEC) -> None:
        one = claim(uid=uid)
        self.records[uid] = ClaimRecord(one, "prepared", "boot", (), (RunMps(spec),))

    def look(self) -> list[tuple[str, str, str]]:
        self.told.clear()
        self.events._look()
        return [
            (uid, reason, text[: len(ALONE if reason == "MpsNotExclusive" else USERS)])
            for uid, reason, text in self.told
        ]


def test_nobody_is_asked_when_no_claim_uses_mps() -> None:
    node = Node()
    node.daemons = (replace(READY, users=(0, 1000)),)
    assert (node.look(), node.asked) == ([], 0)


def test_each_claim_of_a_daemon_is_told_once() -> None:
    node = Node()
    node.use("a")
    node.use("b")
    node.use("c", replace(SPEC, device="gpu-other"))
    assert node.look() == [], "the host does not answer"
    node.daemons = (replace(READY, users=(0, 1000), not_exclusive=(uuid(0),)),)
    wanted = [(reason, text) for reason, text in (("MpsNotExclusive", ALONE), ("MpsUsersWait", USERS))]
    assert node.look() == [(uid, *one) for one in wanted for uid in "ab"]
    assert node.look() == []
    del node.records["a"]
    node.look()
    node.use("a")
    assert node.look() == [("a", *one) for one in wanted], "another claim of this name and UID"


def test_pods_of_further_users_add_no_event_of_a_claim_that_has_one() -> None:
    node = Node()
    node.use("a")
    for user in range(1, 20):
        node.daemons = (replace(READY, users=(0, 1000 + user)),)
        assert len(node.look()) == (1 if user == 1 else 0)


def test_nothing_is_told_when_users_are_alike_or_served_at_once() -> None:
    node = Node()
    node.use("a")
    node.daemons = (replace(READY, users=(1000,)),)
    assert node.look() == []
    node.daemons = (replace(READY, spec=replace(SPEC, multi_user=True), users=(0, 1000)),)
    assert node.look() == []


def test_a_prepared_claim_makes_it_look_soon() -> None:
    node = Node()
    node.events.start()
    try:
        node.use("a")
        node.daemons = (replace(READY, not_exclusive=(uuid(0),)),)
        node.events.prepared(node.records["a"])
        eventually(lambda: [one[:2] for one in node.told] == [("a", "MpsNotExclusive")])
    finally:
        node.events.stop()
