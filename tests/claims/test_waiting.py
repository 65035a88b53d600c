"""Prepare of a device that another claim is about to release."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.claims.rules.plan import Identity
from dra_driver.claims.waiting import WaitTimeouts
from dra_driver.errors import (
    ApiRejectedError,
    DeviceBusyError,
    DraDriverError,
    NvmlTransientError,
    StateError,
)
from dra_driver.model.claim import AllocatedClaim, ClaimRef, Failed, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.fakes.preparing import Node, error_of, in_threads
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
    inventory,
    result,
)
from tests.fakes.waiting import PATIENCE_S, eventually

HOLDER = claim(GPU_0, uid="holder")
SOON_S = 5.3
"""A kubelet deadline that leaves 0.3 s to wait."""


def waits(node: Node, uid: str) -> None:
    eventually(lambda: uid in node.waiting)


IN_USE = "MIG device x is in use by process 4711"


class Calls:
    """Prepares in threads of their own."""

    def __init__(self) -> None:
        self.threads: dict[str, threading.Thread] = {}
        self.answers: dict[str, object] = {}

    def waits(self, node: Node, *wanted: AllocatedClaim) -> None:
        """Each of these waits."""
        for each in wanted:
            self.prepare(node, each)
            waits(node, each.ref.uid)

    def prepare(self, node: Node, wanted: AllocatedClaim, deadline_s: float | None = None) -> None:
        def run() -> None:
            self.answers[wanted.ref.uid] = node.prepare(wanted, deadline_s)

        thread = self.threads[wanted.ref.uid] = threading.Thread(target=run)
        thread.start()

    def answer(self, uid: str) -> object:
        self.threads[uid].join(PATIENCE_S)
        return self.answers[uid]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """An attempt that waits tries again only when it notices a change."""
    return Node(tmp_path, MIXED, patience=WaitTimeouts(recheck_s=3600))


@pytest.fixture
def restless(tmp_path: Path) -> Node:
    """Waiting attempts retry and query at once."""
    return Node(tmp_path, MIXED, patience=WaitTimeouts(recheck_s=0.01))


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


@pytest.mark.parametrize("departs", [delete, deallocate])
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
    assert node.waiting == []


def test_holder_that_stays_is_named_at_once(node: Node) -> None:
    node.prepare(HOLDER)
    text = error_of(node.prepare(claim(GPU_0)))
    assert text.endswith(
        "(gpu-00000000, prepared); the plugin releases the device when all pods of that claim are gone"
    )
    assert (node.outcomes.waits, node.waited_for) == ([], [])


def sharer(uid: str) -> AllocatedClaim:
    return claim(result(GPU_0, share_id=f"share-{uid}"), uid=uid)


@pytest.fixture
def full(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """GPU 0 is shared by MPS, and two claims use it, which is all that it serves."""
    monkeypatch.setattr("dra_driver.claims.rules.plan.max_clients", lambda gpu, versions: 2)
    node.serve(Identity(DRIVER, NODE, share_all(SharingRule("memory", enforce="mps"))))
    for uid in ("one", "two"):
        assert isinstance(node.prepare(sharer(uid)), Prepared)
    return node


@pytest.mark.parametrize("leaving", ["one", "two"])
def test_full_device_is_had_when_one_of_its_users_leaves(full: Node, calls: Calls, leaving: str) -> None:
    full.claims.unused.add(leaving)
    calls.waits(full, sharer("new"))
    assert full.unprepare(sharer(leaving)) is None
    assert isinstance(calls.answer("new"), Prepared)
    assert full.waited_for == [leaving], "the kubelet may have forgotten it"


@pytest.mark.parametrize(("most", "leaving"), [(2, set()), (1, {"two"})])
def test_full_device_is_not_waited_for_when_too_many_of_its_users_stay(
    full: Node, monkeypatch: pytest.MonkeyPatch, most: int, leaving: set[str]
) -> None:
    monkeypatch.setattr("dra_driver.claims.rules.plan.max_clients", lambda gpu, versions: most)
    full.claims.unused |= leaving
    text = error_of(full.prepare(sharer("new")))
    assert "2 claims use the MPS daemon of device gpu-00000000, and MPS serves at most" in text
    assert text.endswith("wait until all pods of one of these claims are gone")
    assert full.outcomes.waits == []


def test_user_that_leaves_a_full_device_too_slowly_is_named(full: Node) -> None:
    full.claims.unused.add("two")
    assert re.search(
        "2 claims use the MPS daemon .*; wait until all pods of one of these claims are gone: claim "
        "default/claim-two .* is no longer used by a pod; waited .* the kubelet retries$",
        error_of(full.prepare(sharer("new"), SOON_S)),
    )


def test_holder_that_stays_is_named_although_another_leaves(node: Node) -> None:
    node.prepare(claim(GPU_1, uid="leaving"))
    node.prepare(HOLDER)
    node.claims.deallocated.add("leaving")
    assert "held by claim default/claim-holder" in error_of(node.prepare(claim(GPU_0, GPU_1)))


@pytest.mark.parametrize("refusal", [None, ApiRejectedError("forbidden", status=403)])
def test_holder_of_which_the_api_server_says_nothing_is_not_waited_for(
    node: Node, refusal: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare(HOLDER)

    def look(ref: object, timeout_s: float) -> None:
        raise refusal or StateError("the API server does not answer")

    monkeypatch.setattr(node.claims, "current", look)
    text = error_of(node.prepare(claim(GPU_0)))
    assert "held by claim default/claim-holder" in text
    assert (
        "gpu-dra-driver cannot find out whether claim default/claim-holder (UID holder) is ending: " in text
    )


def test_running_unprepare_is_waited_for_without_the_api_server(node: Node, calls: Calls) -> None:
    node.prepare(HOLDER)
    node.claims.current = lambda ref, timeout_s: pytest.fail("asked")  # type: ignore[method-assign]
    with node.records.locks.hold("holder", 10):
        unprepare = threading.Thread(target=lambda: node.unprepare(HOLDER))
        unprepare.start()
        eventually(lambda: node.calls.is_in_progress("unprepare", "holder"))
        calls.prepare(node, claim(GPU_0))
        waits(node, "uid-1")
    assert isinstance(calls.answer("uid-1"), Prepared)
    unprepare.join(PATIENCE_S)


def test_no_lock_is_held_while_it_waits(node: Node, calls: Calls) -> None:
    leaving(node)
    calls.waits(node, claim(GPU_0))
    with node.records.planning.hold(1), node.records.locks.hold("uid-1", 1):
        assert node.lanes.under_way() == {}
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_call_fails_for_now_when_the_holder_does_not_leave_in_time_and_the_next_continues(
    node: Node, calls: Calls
) -> None:
    leaving(node)
    files = node.files()
    text = error_of(node.prepare(claim(GPU_0), SOON_S))
    assert text.startswith(
        "cannot prepare claim default/claim-uid-1 (UID uid-1): cleanup of device gpu-00000000 has not finished for "
        "claim default/claim-holder (UID holder), which was deleted; waited "
    )
    assert (node.files(), node.outcomes.waits) == (files, ["uid-1"])
    assert node.outcomes.reported[-1] == ("prepare", "RetryableError")
    calls.waits(node, claim(GPU_0))
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_process_on_the_device_is_named_when_the_holder_does_not_leave_in_time(
    node: Node, calls: Calls
) -> None:
    node.users["holder"] = "process 4711 (python3) still uses it"
    leaving(node)
    assert (
        "cleanup of device gpu-00000000 has not finished for claim default/claim-holder (UID holder), which was "
        "deleted, but process 4711 (python3) still uses it (end the programs on the node); waited "
    ) in error_of(node.prepare(claim(GPU_0), SOON_S))


def test_call_that_the_kubelet_cancels_waits_no_longer(node: Node) -> None:
    leaving(node)
    ref, is_cancelled = node.claims.add(claim(GPU_0)), threading.Event()
    answers: list[object] = []
    prepare = threading.Thread(
        target=lambda: answers.append(node.service.prepare([ref], None, is_cancelled.is_set)[ref.uid])
    )
    prepare.start()
    waits(node, "uid-1")
    is_cancelled.set()
    prepare.join(PATIENCE_S)
    assert "the kubelet cancelled this call" in error_of(answers[0])


def test_first_of_many_waiting_claims_gets_the_device_and_errors_name_it_to_the_others(
    node: Node, calls: Calls
) -> None:
    leaving(node)
    uids = [f"uid-{number}" for number in range(4)]
    calls.waits(node, *(claim(GPU_0, uid=uid) for uid in uids))
    node.unprepare(HOLDER)
    answers = {uid: calls.answer(uid) for uid in uids}
    [winner] = [uid for uid, answer in answers.items() if isinstance(answer, Prepared)]
    for uid in set(uids) - {winner}:
        assert f"is held by claim default/claim-{winner} (UID {winner})" in error_of(answers[uid])
    assert list(node.records.all()) == [winner]


def test_neighbour_on_the_gpu_need_not_wait(node: Node, calls: Calls) -> None:
    node.prepare(claim(MIG_1G, uid="holder"))
    delete(node)
    calls.waits(node, claim(MIG_1G))
    assert isinstance(node.prepare(claim(MIG_3G, uid="uid-2")), Prepared)
    node.unprepare(HOLDER)
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_claim_that_waits_and_is_unprepared_waits_no_longer(restless: Node, calls: Calls) -> None:
    leaving(restless)
    calls.waits(restless, claim(GPU_0))
    assert restless.unprepare(claim(GPU_0)) is None
    assert "unprepared during this call" in error_of(calls.answer("uid-1"))


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


class Refusing:
    """A driver that refuses so many times, on a clock that only sleeping moves on."""

    def __init__(
        self, node: Node, monkeypatch: pytest.MonkeyPatch, error: DraDriverError, times: int = 10**6
    ) -> None:
        self.error = error
        self.now = self.began = time.monotonic()
        self.tries: list[float] = []
        self.times = times
        monkeypatch.setattr(node.waiter, "clock", lambda: self.now)
        monkeypatch.setattr(node.waiter, "_sleep", self._sleep)
        node.steps.on_do = self.refuse

    def _sleep(self, _attempt: object, seconds: float) -> None:
        self.now += seconds

    def refuse(self, _plan: object) -> None:
        self.tries.append(round(self.now - self.began, 3))
        if len(self.tries) <= self.times:
            raise self.error


FOR_NOW = pytest.mark.parametrize(
    "error", [NvmlTransientError("create a GPU instance: Insufficient Resources"), DeviceBusyError(IN_USE)]
)


@FOR_NOW
def test_refusal_for_now_is_retried_until_little_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list, error: DraDriverError
) -> None:
    node = Node(tmp_path, MIXED)
    driver = Refusing(node, monkeypatch, error)
    text = error_of(node.prepare(claim(GPU_0)))
    assert re.search(f"{error}; waited 4[0-9] s; the kubelet retries$", text)
    assert driver.tries[:3] == [0, 0.5, 1.0]
    assert len(driver.tries) >= 79
    assert (node.outcomes.reported, node.files()) == ([("prepare", type(error).__name__)], {})
    reported = [line for line in logs if line["event"] == "prepare_waits"]
    assert [(line["claim_uid"], line["reason"]) for line in reported] == [("uid-1", str(error))]


@FOR_NOW
def test_refusal_that_passes_succeeds_in_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DraDriverError
) -> None:
    node = Node(tmp_path, MIXED)
    driver = Refusing(node, monkeypatch, error, times=3)
    assert isinstance(node.prepare(claim(GPU_0)), Prepared)
    assert (len(driver.tries), node.outcomes.reported) == (4, [("prepare", None)])


def test_claim_whose_record_was_lost_is_not_waited_for(node: Node) -> None:
    leaving(node)
    (node.records.directory / "holder.json").write_text("{")
    node.records.load()
    assert "is held by claim ?/? (UID holder)" in error_of(node.prepare(claim(GPU_0)))


@pytest.mark.parametrize(
    "error", [None, DeviceBusyError, NvmlTransientError], ids=["held", "busy", "refused"]
)
def test_attempt_that_waits_does_not_keep_the_driver_from_stopping(
    tmp_path: Path, calls: Calls, error: type[Exception] | None
) -> None:
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(retry_s=30, stop_s=0.01))

    def refuse(_plan: object) -> None:
        assert error is not None
        raise error(IN_USE)

    if error:
        node.steps.on_do = refuse
    else:
        node.prepare(HOLDER)
        delete(node)
    calls.prepare(node, claim(GPU_0))
    waits(node, "uid-1")
    node.waiter.stop()
    assert ("in use by" if error else "has not finished") in error_of(calls.answer("uid-1"))


def test_claims_that_swapped_devices_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """The kubelet lost its state and forgot their Unprepare, and they were allocated again."""
    node = Node(tmp_path, MIXED, patience=WaitTimeouts(recheck_s=0.05))
    node.prepare(claim(GPU_0, uid="x"))
    node.prepare(claim(GPU_1, uid="y"))
    swapped = [claim(GPU_1, uid="x"), claim(GPU_0, uid="y")]
    for each in swapped:
        node.claims.add(each)
    both = threading.Barrier(2)

    def prepare(wanted: AllocatedClaim) -> object:
        both.wait(PATIENCE_S)
        return node.prepare(wanted)

    answers = in_threads(lambda: prepare(swapped[0]), lambda: prepare(swapped[1]))
    assert all(isinstance(answer, Prepared) for answer in answers), answers
    assert {uid: record.claim for uid, record in node.records.all().items()} == {
        each.ref.uid: each for each in swapped
    }


def test_attempt_that_waits_keeps_what_is_still_allocated_to_its_claim(restless: Node, calls: Calls) -> None:
    restless.prepare(claim(GPU_1))
    leaving(restless)
    files = restless.files()
    tries = tries_of(restless)
    calls.prepare(restless, claim(GPU_0, GPU_1))
    eventually(lambda: len(tries) > 3)
    assert restless.files() == files
    assert restless.unprepare(HOLDER) is None
    assert isinstance(calls.answer("uid-1"), Prepared)


def test_release_is_seen_although_the_api_server_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that waits for several holders does not query those that have gone."""
    node = Node(tmp_path, MIXED)
    holders = [claim(GPU_0, uid="holder"), claim(GPU_1, uid="other")]
    for each in holders:
        node.prepare(each)
        node.claims.deallocated.add(each.ref.uid)
    requested: list[str] = []
    look = node.claims.current

    def slow(ref: ClaimRef, timeout_s: float) -> object:
        requested.append(ref.uid)
        for each in holders:
            node.unprepare(each)
        return look(ref, timeout_s)

    monkeypatch.setattr(node.claims, "current", slow)
    assert isinstance(node.prepare(claim(GPU_0, GPU_1)), Prepared)
    assert len(requested) == 1


def tries_of(node: Node) -> list[int]:
    """Return a list that gets an entry for each plan that the node makes from now on."""
    tries: list[int] = []
    plan = node.preparer.planner.plan
    node.preparer.planner.plan = lambda *args: tries.append(1) or plan(*args)  # type: ignore[func-returns-value, method-assign]
    return tries


@pytest.mark.parametrize("departs", [delete, replace_it])
def test_holder_whose_claim_is_gone_is_requested_once(
    restless: Node, calls: Calls, departs: Callable[[Node], None]
) -> None:
    holder = claim(GPU_0, GPU_1, uid="holder")
    restless.prepare(holder)
    departs(restless)
    tries = tries_of(restless)
    calls.prepare(restless, claim(GPU_0, GPU_1))
    eventually(lambda: len(tries) > 3)
    assert restless.unprepare(holder) is None
    assert isinstance(calls.answer("uid-1"), Prepared)
    assert restless.claims.looks == ["holder"]


@pytest.mark.parametrize("seed", range(2))
def test_claims_at_random_are_never_given_one_device_and_end_clean(tmp_path: Path, seed: int) -> None:
    """Four claims over two GPUs: prepared, deleted, unprepared, each in its own order."""
    node = Node(tmp_path, inventory(h100(0), h100(1)), patience=WaitTimeouts(recheck_s=0.02))
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

    def end(ref: ClaimRef) -> None:
        with guard:
            for device in [name for name, uid in owners.items() if uid == ref.uid]:
                del owners[device]

    node.steps.on_do, node.steps.on_undo = begin, end

    def live(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        for _ in range(6):
            uid = f"uid-{number}"
            devices = chance.choice([(GPU_0,), (GPU_1,), (GPU_0, GPU_1)])
            wanted = claim(*devices, uid=uid)
            node.claims.unused.discard(uid)
            answer = node.prepare(wanted, PATIENCE_S)
            if isinstance(answer, Failed):
                assert "is held by" in answer.error or "has not finished" in answer.error, answer
            depart = chance.choice(["unused", "deleted", "kept"])
            if depart == "unused":
                node.claims.unused.add(uid)
            elif depart == "deleted":
                node.claims.allocated.pop(uid, None)
            assert node.unprepare(wanted) is None

    assert in_threads(*(lambda number=number: live(number) for number in range(4))) == [None] * 4
    assert (violations, owners, node.files()) == ([], {}, {})


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
