"""Prepare of a device that another claim is about to let go of."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.planner import Identity
from dra_driver.claims.rules.plan import Conflict, DeviceHeldError
from dra_driver.claims.waiting_line import PrepareAttempt, WaitTimeouts
from dra_driver.errors import ApiRejectedError, DeviceBusyError, NvmlTransientError, StateError
from dra_driver.journal.locks import ClaimLocks
from dra_driver.model.claim import AllocatedClaim, ClaimRef, Failed, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.fakes.preparing import Node, in_threads
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    NODE,
    claim,
    h100,
    hold,
    inventory,
    record,
    result,
)
from tests.fakes.waiting import eventually

HOLDER = claim(GPU_0, uid="holder")
SOON_S = 3.0
"""A deadline of the kubelet that leaves a second, which no test that works uses up."""


def waits(node: Node, *uids: str) -> None:
    eventually(lambda: node.line.waiting == list(uids))


def error_of(answer: object) -> str:
    assert isinstance(answer, Failed), answer
    return answer.error


def attempt(wanted: AllocatedClaim, deadline: float) -> PrepareAttempt:
    return PrepareAttempt(wanted.ref, KubeletCall(0, deadline), wanted)


IN_USE = "MIG device x is in use by process 4711"


def busy(_subject: object) -> None:
    raise DeviceBusyError(IN_USE)


def busy_at_first(tries: list[int]) -> Callable[[object], None]:
    """Busy three times, and free then."""

    def undecided(subject: object) -> None:
        tries.append(1)
        if len(tries) < 4:
            busy(subject)

    return undecided


class Calls:
    """Prepares in threads of their own."""

    def __init__(self) -> None:
        self.threads: dict[str, threading.Thread] = {}
        self.answers: dict[str, object] = {}

    def waits(self, node: Node, *wanted: AllocatedClaim) -> None:
        """These come one after the other, and each waits."""
        for each in wanted:
            before = node.line.waiting
            self.prepare(node, each)
            waits(node, *before, each.ref.uid)

    def prepare(self, node: Node, wanted: AllocatedClaim, deadline_s: float | None = None) -> None:
        def run() -> None:
            self.answers[wanted.ref.uid] = node.prepare(wanted, deadline_s)

        thread = self.threads[wanted.ref.uid] = threading.Thread(target=run)
        thread.start()

    def answer(self, uid: str) -> object:
        self.threads[uid].join(20)
        return self.answers[uid]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Here who waits has to notice by itself: it does not try again for the sake of trying."""
    return Node(tmp_path, MIXED, patience=WaitTimeouts(ask_again_s=3600))


@pytest.fixture
def restless(tmp_path: Path) -> Node:
    """Here who waits looks and asks again at once."""
    return Node(tmp_path, MIXED, patience=WaitTimeouts(poll_s=0.01, ask_again_s=0.01))


@pytest.fixture
def calls() -> Calls:
    return Calls()


def delete(node: Node) -> None:
    del node.claims.allocated["holder"]


def leaving(node: Node, departs: Callable[[Node], None] = delete) -> None:
    """A holder that will not stay."""
    node.prepare(HOLDER)
    departs(node)


def replace_it(node: Node) -> None:
    delete(node)
    new = claim(GPU_1, uid="another")
    node.claims.allocated["another"] = AllocatedClaim(
        type(new.ref)("default", HOLDER.ref.name, "another"), new.results
    )


def deallocate(node: Node) -> None:
    node.claims.deallocated.add("holder")


def move(node: Node) -> None:
    node.claims.add(claim(GPU_1, uid="holder"))


def leave_unused(node: Node) -> None:
    node.claims.unused.add("holder")


@pytest.mark.parametrize("departs", [delete, replace_it, deallocate, move, leave_unused])
def test_prepare_waits_for_the_unprepare_of_a_holder_that_is_leaving(
    node: Node, calls: Calls, departs: Callable[[Node], None]
) -> None:
    leaving(node, departs)
    calls.waits(node, claim(GPU_0))
    assert node.unprepare(HOLDER) is None
    assert isinstance(calls.answer("uid-1"), Prepared)
    assert (list(node.records.all()), node.outcomes.waits, node.waited_for) == (
        ["uid-1"],
        ["uid-1"],
        ["holder"],
    )
    assert node.line.waiting == []


def test_two_answers_of_the_disk_about_a_holder_make_no_attempt_spin(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory still lists the record, and its file is gone."""
    node.prepare(HOLDER)
    found, tries = node.records.get, []

    def gone(uid: str) -> object:
        tries.append(uid)
        return None if uid == "holder" else found(uid)

    monkeypatch.setattr(node.line, "records", SimpleNamespace(get=gone))
    assert isinstance(node.prepare(claim(GPU_0), 2.5), Failed)
    assert 1 < len(tries) < 400


def test_holder_that_stays_is_named_at_once(node: Node) -> None:
    node.prepare(HOLDER)
    text = error_of(node.prepare(claim(GPU_0)))
    assert text.endswith("(gpu-00000000, prepared); it becomes free when that claim's pod is gone")
    assert (node.outcomes.waits, node.waited_for, node.line.waiting) == ([], [], [])


FULL = "2 claims use the MPS daemon of device gpu-00000000, and MPS serves at most 2 clients"


def sharer(uid: str) -> AllocatedClaim:
    return claim(result(GPU_0, share_id=f"share-{uid}"), uid=uid)


@pytest.fixture
def full(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """GPU 0 is shared by MPS, and two claims use it, which is all that it serves."""
    monkeypatch.setattr("dra_driver.claims.rules.plan.most_clients", lambda gpu, versions: 2)
    node.serve(Identity(DRIVER, NODE, share_all(SharingRule("memory", enforce="mps"))))
    for uid in ("one", "two"):
        assert isinstance(node.prepare(sharer(uid)), Prepared)
    return node


@pytest.mark.parametrize("leaving", ["one", "two"])
def test_the_release_of_one_user_is_enough_when_a_device_is_full(
    full: Node, calls: Calls, leaving: str
) -> None:
    full.claims.unused.add(leaving)
    calls.waits(full, sharer("new"))
    assert full.unprepare(sharer(leaving)) is None
    assert isinstance(calls.answer("new"), Prepared)
    assert full.waited_for == [leaving]


def test_a_full_device_is_not_waited_for_when_all_its_users_stay(full: Node) -> None:
    text = error_of(full.prepare(sharer("new")))
    assert f"{FULL} with this GPU and driver; wait until one of them is gone" in text
    assert (full.outcomes.waits, full.waited_for, full.line.waiting) == ([], [], [])


def test_a_full_device_is_not_waited_for_when_more_must_leave_than_do(
    full: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.rules.plan.most_clients", lambda gpu, versions: 1)
    full.claims.unused.add("two")
    assert "2 claims use the MPS daemon" in error_of(full.prepare(sharer("new")))
    assert full.outcomes.waits == []


def test_a_second_claim_waits_no_longer_when_the_first_in_line_got_the_place(
    full: Node, calls: Calls
) -> None:
    full.claims.unused.add("two")
    calls.waits(full, sharer("first"), sharer("second"))
    assert full.unprepare(sharer("two")) is None
    assert isinstance(calls.answer("first"), Prepared)
    assert FULL in error_of(calls.answer("second"))


def test_the_user_that_leaves_is_named_when_it_leaves_too_slowly(full: Node) -> None:
    full.claims.unused.add("two")
    text = error_of(full.prepare(sharer("new"), SOON_S))
    assert (
        f"{FULL} with this GPU and driver; wait until one of them is gone: claim default/claim-two " in text
    )
    assert "is used by no pod any more; waited " in text
    assert text.endswith("the kubelet tries again")


def test_one_that_stays_is_named_although_another_leaves(node: Node) -> None:
    node.prepare(claim(GPU_1, uid="leaving"))
    node.prepare(HOLDER)
    node.claims.deallocated.add("leaving")
    assert "held by claim default/claim-holder" in error_of(node.prepare(claim(GPU_0, GPU_1)))


@pytest.mark.parametrize("refusal", [None, ApiRejectedError("forbidden", status=403)])
def test_nobody_waits_in_doubt(
    node: Node, refusal: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare(HOLDER)

    def look(ref: object, timeout_s: float) -> None:
        raise refusal or StateError("the API server does not answer")

    monkeypatch.setattr(node.claims, "look", look)
    text = error_of(node.prepare(claim(GPU_0)))
    assert "held by claim default/claim-holder" in text
    assert "whether that claim is about to end is not known: " in text


def test_unprepare_under_way_is_waited_for_without_the_api_server(node: Node, calls: Calls) -> None:
    node.prepare(HOLDER)
    undoing, go_on = threading.Event(), threading.Event()
    locked = threading.Event()

    def slowly(record: object) -> None:
        undoing.set()
        assert go_on.wait(10)

    node.steps.on_undo = slowly
    node.claims.look = lambda ref, timeout_s: pytest.fail("asked")  # type: ignore[method-assign]
    hold = node.planning.hold

    def noted(*wanted: object) -> object:
        locked.set()
        return hold(*wanted)  # type: ignore[arg-type]

    unprepare = threading.Thread(target=lambda: node.unprepare(HOLDER))
    unprepare.start()
    assert undoing.wait(10)
    node.planning.hold = noted  # type: ignore[assignment,method-assign]
    calls.prepare(node, claim(GPU_0))
    assert locked.wait(10)
    go_on.set()
    assert isinstance(calls.answer("uid-1"), Prepared)
    unprepare.join(10)


def test_unprepare_that_has_no_lock_yet_is_waited_for_without_the_api_server(
    node: Node, calls: Calls
) -> None:
    node.prepare(HOLDER)
    node.claims.look = lambda ref, timeout_s: pytest.fail("asked")  # type: ignore[method-assign]
    with ClaimLocks(node.directory / "locks").hold("holder", 10):
        unprepare = threading.Thread(target=lambda: node.unprepare(HOLDER))
        unprepare.start()
        eventually(lambda: node.line.is_called("unprepare", "holder"))
        calls.prepare(node, claim(GPU_0))
        waits(node, "uid-1")
    assert isinstance(calls.answer("uid-1"), Prepared)
    unprepare.join(10)


def test_unprepare_in_the_other_instance_is_noticed(node: Node, calls: Calls) -> None:
    leaving(node)
    calls.waits(node, claim(GPU_0))
    assert node.restarted().unprepare(HOLDER) is None
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_no_lock_is_held_while_it_waits(node: Node, calls: Calls) -> None:
    leaving(node)
    calls.waits(node, claim(GPU_0))
    with node.planning.hold([MIXED.by_name[GPU_0].gpu.uuid], 1), node.claim_locks.hold("uid-1", 1):
        assert node.lanes.under_way() == {}
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_call_fails_for_now_when_the_holder_does_not_leave_in_time_and_the_next_goes_on(
    node: Node, calls: Calls
) -> None:
    leaving(node)
    files = node.files()
    text = error_of(node.prepare(claim(GPU_0), 2.8))
    assert text.startswith(
        "prepare claim default/claim-uid-1 (UID uid-1): device gpu-00000000 is still being torn down for claim "
        "default/claim-holder (UID holder), which was deleted; waited "
    )
    assert (node.files(), node.line.waiting, node.outcomes.waits) == (files, [], ["uid-1"])
    assert node.outcomes.told[-1] == ("prepare", "RetryableError")
    calls.waits(node, claim(GPU_0))
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_who_waits_in_vain_hears_what_still_computes_on_the_device(tmp_path: Path, calls: Calls) -> None:
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(poll_s=0.01, ask_again_s=0.01, stop_s=0))
    node.users["holder"] = "process 4711 (python3) still computes on it"
    leaving(node)
    for uid in ("uid-1", "uid-2"):
        calls.prepare(node, claim(GPU_0, uid=uid))
    eventually(lambda: len(node.line.waiting) == 2)
    eventually(lambda: all(place.users for place in node.line.line))
    node.line.stop()
    for uid in ("uid-1", "uid-2"):
        assert (
            "device gpu-00000000 is still being torn down for claim default/claim-holder (UID holder), which was "
            "deleted, but process 4711 (python3) still computes on it: end that process on the node; waited "
        ) in error_of(calls.answer(uid))


def test_nobody_asks_what_computes_when_there_is_no_time_for_it(tmp_path: Path, calls: Calls) -> None:
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(poll_s=0.01, ask_again_s=0.01, stop_s=0, users_s=3600))
    node.users["holder"] = "process 4711 (python3) still computes on it"
    leaving(node, deallocate)
    calls.prepare(node, claim(GPU_0))
    eventually(lambda: len(node.claims.looks) > 3)
    node.line.stop()
    assert "which is not allocated any more; waited " in error_of(calls.answer("uid-1"))


def test_those_who_wait_are_served_in_order_and_the_next_is_told_who_has_it(node: Node, calls: Calls) -> None:
    leaving(node)
    calls.waits(node, *(claim(GPU_0, uid=f"uid-{number}") for number in range(4)))
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-0"), Prepared)
    for number in range(1, 4):
        assert "is held by claim default/claim-uid-0 (UID uid-0)" in error_of(calls.answer(f"uid-{number}"))
    assert (list(node.records.all()), node.line.waiting) == (["uid-0"], [])


def test_who_comes_later_does_not_overtake(node: Node, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is free already, but the one who waits for it was not woken yet."""
    leaving(node)
    calls.waits(node, claim(GPU_0, uid="uid-1"))
    read, go_on = node.claim_locks.hold, threading.Event()

    def slowly(uid: str, *more: Any) -> object:
        assert uid != "uid-1" or go_on.wait(10)
        return read(uid, *more)

    monkeypatch.setattr(node.claim_locks, "hold", slowly)
    node.unprepare(HOLDER)
    calls.waits(node, claim(GPU_0, uid="uid-2"))
    go_on.set()
    assert isinstance(calls.answer("uid-1"), Prepared)
    assert "is held by claim default/claim-uid-1" in error_of(calls.answer("uid-2"))


def test_neighbour_on_the_gpu_need_not_wait(node: Node, calls: Calls) -> None:
    node.prepare(claim(MIG_1G, uid="holder"))
    delete(node)
    calls.waits(node, claim(MIG_1G))
    assert isinstance(node.prepare(claim(MIG_3G, uid="uid-2")), Prepared)
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_who_waits_leaves_the_line_when_its_call_is_over(node: Node, calls: Calls) -> None:
    leaving(node)
    calls.prepare(node, claim(GPU_0, uid="uid-1"), 2.8)
    waits(node, "uid-1")
    calls.prepare(node, claim(GPU_0, uid="uid-2"))
    assert "still being torn down" in error_of(calls.answer("uid-1"))
    waits(node, "uid-2")
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-2"), Prepared)


def test_who_waits_is_let_go_when_it_is_unprepared_itself(node: Node, calls: Calls) -> None:
    leaving(node)
    calls.waits(node, claim(GPU_0, uid="uid-1"), claim(GPU_0, uid="uid-2"))
    assert node.unprepare(claim(GPU_0, uid="uid-1")) is None
    assert "unprepared while this call was under way" in error_of(calls.answer("uid-1"))
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-2"), Prepared)


def test_holder_that_stays_after_all_is_named(restless: Node, calls: Calls) -> None:
    leaving(restless, deallocate)
    calls.waits(restless, claim(GPU_0))
    restless.claims.deallocated.clear()
    assert "held by claim default/claim-holder" in error_of(calls.answer("uid-1"))
    assert restless.outcomes.waits == ["uid-1"]


def test_silence_after_the_answer_does_not_end_the_waiting(restless: Node, calls: Calls) -> None:
    leaving(restless, deallocate)
    calls.waits(restless, claim(GPU_0))
    restless.claims.down = True
    before = len(restless.claims.looks)
    eventually(lambda: len(restless.claims.looks) > before + 3)
    restless.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_long_silence_ends_it_where_the_holder_may_have_come_back(tmp_path: Path, calls: Calls) -> None:
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(poll_s=0.01, ask_again_s=0.01, doubt_s=0.05))
    leaving(node, deallocate)
    calls.waits(node, claim(GPU_0))
    node.claims.down = True
    assert "is not known: look at claim" in error_of(calls.answer("uid-1"))


def test_busy_device_is_tried_again_for_a_while(tmp_path: Path) -> None:
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(busy_pause_s=0.01, busy_s=5))
    tries: list[int] = []
    node.steps.on_do = busy_at_first(tries)
    assert isinstance(node.prepare(claim(GPU_0)), Prepared)
    assert (len(tries), node.outcomes.waits) == (4, ["uid-1"])


def test_device_that_stays_busy_is_told_with_what_keeps_it(tmp_path: Path) -> None:
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(busy_pause_s=0.01, busy_s=0.05))
    node.steps.on_do = busy
    assert error_of(node.prepare(claim(GPU_0))).endswith("in use by process 4711")
    assert node.files() == {}


REFUSED = "create a GPU instance: Insufficient Resources"


class Refusing:
    """A driver that refuses so many times, on a clock that only sleeping moves on."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch, times: int = 10**6) -> None:
        self.now = self.began = time.monotonic()
        self.tries: list[float] = []
        self.times = times
        monkeypatch.setattr(node.line, "clock", lambda: self.now)
        monkeypatch.setattr(node.line, "_sleep", self._sleep)
        node.steps.on_do = self.refuse

    def _sleep(self, _seen: int, seconds: float) -> None:
        self.now += seconds

    def refuse(self, _plan: object) -> None:
        self.tries.append(round(self.now - self.began, 3))
        if len(self.tries) <= self.times:
            raise NvmlTransientError(REFUSED)


def test_what_is_refused_for_now_is_tried_again_at_growing_pauses_and_told_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    node = Node(tmp_path, MIXED)
    driver = Refusing(node, monkeypatch)
    text = error_of(node.prepare(claim(GPU_0), 3600))
    assert text.endswith(f"{REFUSED}; refused 8 times in 20 s; the kubelet tries again")
    assert driver.tries == [0, 0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 19.5]
    assert node.outcomes.told == [("prepare", "NvmlTransientError")]
    assert (node.files(), node.line.line, node.outcomes.waits) == ({}, [], [])
    told = [line for line in logs if line["event"].startswith("nvml_")]
    assert [(line["event"], line["claim_uid"], line["reason"]) for line in told] == [
        ("nvml_refuses", "uid-1", REFUSED)
    ]


@pytest.mark.parametrize("times", [1, 3, 7])
def test_what_is_refused_for_a_while_succeeds_in_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list, times: int
) -> None:
    node = Node(tmp_path, MIXED)
    driver = Refusing(node, monkeypatch, times)
    assert isinstance(node.prepare(claim(GPU_0), 3600), Prepared)
    assert (len(driver.tries), node.outcomes.told) == (times + 1, [("prepare", None)])
    [passed] = [line for line in logs if line["event"] == "nvml_refusal_passed"]
    assert (passed["refusals"], passed["duration_s"]) == (times, round(driver.tries[-1], 1))


@pytest.mark.parametrize(("left_s", "tries"), [(11, [0, 0.5, 1.5, 3.5, 7.5]), (3.2, [0])])
def test_refusal_is_told_while_the_kubelet_still_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, tries: list[float]
) -> None:
    """A try takes up to three seconds."""
    node = Node(tmp_path, MIXED)
    driver = Refusing(node, monkeypatch)
    place = attempt(claim(GPU_0), driver.now + left_s)
    with node.line.trying(place):

        def prepare() -> None:
            while True:
                try:
                    driver.refuse(None)
                except NvmlTransientError as error:
                    node.line.wait(place, error)

        with pytest.raises(NvmlTransientError) as caught:
            prepare()
    assert driver.tries == tries
    often = f"; refused {len(tries)} times in 8 s; the kubelet tries again" if len(tries) > 1 else ""
    assert str(caught.value) == f"{REFUSED}{often}"


@pytest.mark.parametrize("other", [DeviceHeldError, DeviceBusyError])
def test_patience_with_refusals_begins_anew_after_something_else_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list, other: type[Exception]
) -> None:
    node = Node(tmp_path, MIXED)
    driver = Refusing(node, monkeypatch)
    busy = DeviceBusyError("in use") if other is DeviceBusyError else held_by_nobody()
    place = attempt(claim(GPU_0), driver.now + 3600)
    with node.line.trying(place):
        for _ in range(3):
            node.line.wait(place, NvmlTransientError(REFUSED))
        driver.now += 22
        node.line.wait(place, busy)
        began = driver.now
        for _ in range(2):
            node.line.wait(place, NvmlTransientError(REFUSED))
        assert round(driver.now - began, 3) == 1.5, "the pauses are short again"
    told = [line for line in logs if line["event"].startswith("nvml_")]
    assert [line["event"] for line in told] == ["nvml_refuses", "nvml_refuses", "nvml_refusal_passed"]
    assert (told[-1]["refusals"], told[-1]["duration_s"]) == (2, 1.5)


def held_by_nobody() -> DeviceHeldError:
    """By a record that is gone by now."""
    holder = record(hold(GPU_0))
    return DeviceHeldError([Conflict(holder, holder.devices[0], "held")], [hold(GPU_0)])


@pytest.mark.parametrize(
    ("phase", "is_tried", "is_waited_for"),
    [("preparing", True, True), ("preparing", False, False), ("prepared", True, False)],
)
def test_claim_that_is_being_prepared_is_waited_for_and_one_left_in_preparing_holds(
    node: Node, calls: Calls, phase: Any, is_tried: bool, is_waited_for: bool
) -> None:
    node.prepare(HOLDER)
    prepared = node.records.get("holder")
    assert prepared is not None
    node.records.save(replace(prepared, phase=phase))
    trying = node.line.trying(attempt(HOLDER, math.inf)) if is_tried else nullcontext()
    with node.line.calling("prepare", "holder"), trying:
        if not is_waited_for:
            assert "is held by claim default/claim-holder" in error_of(node.prepare(claim(GPU_0)))
            return
        calls.prepare(node, claim(GPU_0))
        waits(node, "uid-1")
        node.records.delete("holder")
    assert isinstance(calls.answer("uid-1"), Prepared)
    assert node.claims.looks == []


def test_claim_whose_record_was_lost_is_not_waited_for(node: Node) -> None:
    leaving(node)
    (node.records.directory / "holder.json").write_text("{")
    assert "is held by claim ?/? (UID holder)" in error_of(node.prepare(claim(GPU_0)))


@pytest.mark.parametrize(
    "error", [None, DeviceBusyError, NvmlTransientError], ids=["held", "busy", "refused"]
)
def test_nobody_keeps_the_driver_from_stopping(
    tmp_path: Path, calls: Calls, error: type[Exception] | None
) -> None:
    pauses = {"busy_pause_s": 30, "refused_pause_s": 30, "refused_pause_most_s": 30}
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(stop_s=0.01, busy_s=30, refused_s=60, **pauses))
    begun = threading.Event()

    def refuse(_plan: object) -> None:
        begun.set()
        assert error is not None
        raise error(IN_USE)

    if error:
        node.steps.on_do = refuse
    else:
        node.prepare(HOLDER)
        delete(node)
    calls.prepare(node, claim(GPU_0))
    if error:
        assert begun.wait(10)
    else:
        waits(node, "uid-1")
    node.line.stop()
    assert ("in use by" if error else "still being torn down") in error_of(calls.answer("uid-1"))


def test_claims_that_swapped_devices_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Their Unprepare was forgotten with the kubelet's own state, and they were allocated anew."""
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(poll_s=0.01, ask_again_s=0.05))
    node.prepare(claim(GPU_0, uid="x"))
    node.prepare(claim(GPU_1, uid="y"))
    swapped = [claim(GPU_1, uid="x"), claim(GPU_0, uid="y")]
    for each in swapped:
        node.claims.add(each)
    both = threading.Barrier(2)

    def prepare(wanted: AllocatedClaim) -> object:
        both.wait(10)
        return node.prepare(wanted)

    answers = in_threads(lambda: prepare(swapped[0]), lambda: prepare(swapped[1]))
    assert all(isinstance(answer, Prepared) for answer in answers), answers
    assert {uid: record.claim for uid, record in node.records.all().items()} == {
        each.ref.uid: each for each in swapped
    }


def test_who_waits_keeps_what_it_has_while_that_is_still_allocated_to_it(node: Node, calls: Calls) -> None:
    node.prepare(claim(GPU_1))
    leaving(node)
    files = node.files()
    calls.waits(node, claim(GPU_0, GPU_1))
    with node.line.changed:
        node.line.line[0].withdrawn = True  # has it try again
        node.line.notify()
    eventually(lambda: not any(place.withdrawn for place in node.line.line))
    node.line.stop()
    assert node.files() == files
    assert node.unprepare(HOLDER) is None
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_release_is_seen_although_the_api_server_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for several holders does not ask for all of them where one has let go meanwhile."""
    node = Node(tmp_path, MIXED)
    holders = [claim(GPU_0, uid="holder"), claim(GPU_1, uid="other")]
    for each in holders:
        node.prepare(each)
        node.claims.deallocated.add(each.ref.uid)
    asked: list[str] = []
    look = node.claims.look

    def slow(ref: ClaimRef, timeout_s: float) -> object:
        asked.append(ref.uid)
        for each in holders:
            node.unprepare(each)
        return look(ref, timeout_s)

    monkeypatch.setattr(node.claims, "look", slow)
    assert isinstance(node.prepare(claim(GPU_0, GPU_1)), Prepared)
    assert len(asked) == 1


def test_what_is_for_good_is_asked_once(restless: Node, calls: Calls) -> None:
    leaving(restless)
    tries: list[int] = []
    ahead = restless.line.ahead_of
    restless.line.ahead_of = lambda place: tries.append(1) or ahead(place)  # type: ignore[func-returns-value, method-assign]
    calls.prepare(restless, claim(GPU_0))
    eventually(lambda: len(tries) > 3)
    assert restless.unprepare(HOLDER) is None
    assert isinstance(calls.answer("uid-1"), Prepared)
    assert restless.claims.looks == ["holder"]


def test_crash_while_it_waits_leaves_nothing(node: Node, calls: Calls) -> None:
    """The other instance does not know of the one that waits here, nor is anything on disk."""
    leaving(node)
    files = node.files()
    calls.prepare(node, claim(GPU_0), SOON_S)
    waits(node, "uid-1")
    assert node.files() == files
    following = node.restarted()
    following.unprepare(HOLDER)
    calls.answer("uid-1")
    assert isinstance(following.prepare(claim(GPU_0)), Prepared)


@pytest.mark.parametrize("seed", range(4))
def test_claims_at_random_are_never_given_one_device_and_end_clean(tmp_path: Path, seed: int) -> None:
    """Four claims over two GPUs and two instances: prepared, deleted, unprepared, each in its own order."""
    node = Node(tmp_path, inventory(h100(0), h100(1)), patience=WaitTimeouts(poll_s=0.005, ask_again_s=0.02))
    nodes = [node, node.restarted()]
    owners: dict[str, str] = {}
    guard = threading.Lock()
    violations: list[tuple[str, str, str]] = []

    def begin(plan: object) -> None:
        with guard:
            for planned in plan.devices:  # type: ignore[attr-defined]
                device, uid = planned.offered.name, plan.claim.ref.uid  # type: ignore[attr-defined]
                owner = owners.setdefault(device, uid)
                if owner != uid:
                    violations.append((device, owner, uid))

    def end(record: object) -> None:
        with guard:
            for device in [name for name, uid in owners.items() if uid == record.ref.uid]:  # type: ignore[attr-defined]
                del owners[device]

    for instance in nodes:
        instance.steps.on_do, instance.steps.on_undo = begin, end

    def live(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        for _ in range(6):
            uid = f"uid-{number}"
            devices = chance.choice([(GPU_0,), (GPU_1,), (GPU_0, GPU_1)])
            wanted = claim(*devices, uid=uid)
            node.claims.unused.discard(uid)
            answer = chance.choice(nodes).prepare(wanted, 4.0)
            if isinstance(answer, Failed):
                assert "is held by" in answer.error or "still being torn down" in answer.error, answer
            depart = chance.choice(["unused", "deleted", "kept"])
            if depart == "unused":
                node.claims.unused.add(uid)
            elif depart == "deleted":
                node.claims.allocated.pop(uid, None)
            assert chance.choice(nodes).unprepare(wanted) is None

    assert in_threads(*(lambda number=number: live(number) for number in range(4))) == [None] * 4
    assert (violations, owners, node.files()) == ([], {}, {})
    assert [instance.line.waiting for instance in nodes] == [[], []]


def test_shares_in_ways_that_exclude_each_other_wait_too(node: Node, calls: Calls) -> None:
    """A whole use of a device that is shared waits for each share that is leaving."""
    shares = [claim(result(GPU_0, share_id=f"share-{number}"), uid=f"share-{number}") for number in range(2)]
    for share in shares:
        assert isinstance(node.prepare(share), Prepared)
        node.claims.unused.add(share.ref.uid)
    calls.waits(node, claim(GPU_0))
    for share in shares:
        node.unprepare(share)
    assert isinstance(calls.answer("uid-1"), Prepared)
