"""The right to work on a node, and the calls that wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.app.daemon import Driver, Part
from dra_driver.app.handover import WorkerLock
from dra_driver.base.threads import BackgroundWorker
from dra_driver.claims.calls import Admission, CallsUnderWay, ClaimService, PrepareAttempt
from dra_driver.errors import FatalError
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.preparing import Outcomes
from tests.fakes.samples import claim
from tests.fakes.waiting import PATIENCE_S, eventually

HOST, CONTAINER = "pid:[4026531836]", "pid:[4026532999]"
CLAIM = ClaimRef("default", "one", "uid-1")


class Node:
    """A node whose processes all have the PID of this one, but other start times."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.locks: list[WorkerLock] = []

    def process(self, started: int, namespace: str = CONTAINER) -> WorkerLock:
        self.locks.append(WorkerLock(self.root / "plugin", self._proc(started, namespace)))
        return self.locks[-1]

    def _proc(self, started: int, namespace: str) -> str:
        proc = self.root / f"proc-{started}"
        (proc / "self/ns").mkdir(parents=True)
        (proc / "self/ns/pid").symlink_to(namespace)
        stat = proc / str(os.getpid()) / "stat"
        stat.parent.mkdir()
        stat.write_text(f"{os.getpid()} (x) S {' '.join(['0'] * 18)} {started} 0")
        return str(proc)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for lock in node.locks:
        lock.close()


def test_processes_whose_lock_file_was_removed_start_again(node: Node) -> None:
    """They and a newer process would lock different files."""
    older, standby = node.process(100), node.process(200)
    assert older.take()
    standby.ask()
    (node.root / "plugin/worker.lock").unlink()
    for used in (older.is_asked, older.take, standby.ask, standby.take):
        with pytest.raises(FatalError, match="lock was removed"):
            used()


def test_newer_process_that_asks_works_when_the_older_one_has_handed_over(node: Node) -> None:
    older, newer = node.process(100), node.process(200)
    assert older.take()
    assert older.take()
    assert not newer.take()
    assert not older.is_asked(), "the kubelet has not registered it yet"
    newer.ask()
    assert older.is_asked()
    assert not newer.take()
    older.close()
    assert not older.take(), "a newer one asks"
    assert newer.take()
    assert not newer.is_asked()
    newer.close()  # as at its end
    assert not older.is_asked()
    assert older.take()


def test_older_process_that_asks_does_not_get_the_work(node: Node) -> None:
    older, newer = node.process(100), node.process(200)
    assert newer.take()
    older.ask()
    assert not newer.is_asked()
    assert not older.take()


def test_of_three_processes_the_newest_works(node: Node) -> None:
    oldest, middle, newest = (node.process(started) for started in (100, 200, 300))
    assert oldest.take()
    middle.ask()
    newest.ask()
    oldest.close()
    assert not middle.take()
    assert newest.take()
    newest.close()
    assert not oldest.take()
    assert middle.take()


def test_two_processes_that_start_at_the_same_time_do_not_both_work(node: Node) -> None:
    ones = [node.process(started) for started in range(100, 108)]
    for _ in range(50):
        with ThreadPoolExecutor(len(ones)) as pool:
            assert sum(pool.map(WorkerLock.take, ones)) <= 1
        assert sum(one.take() for one in ones) == 1
        for one in ones:
            one.close()


def test_process_that_was_killed_and_hangs_in_the_kernel_does_not_count(node: Node) -> None:
    hanging, following = node.process(100, HOST), node.process(200, HOST)
    hanging.ask()
    # Neither sees the other's start time in procfs, as if the other process had ended and kept its locks.
    assert hanging.take()
    assert following.take()
    assert not hanging.is_asked()


def test_process_of_a_hidden_pid_namespace_counts_as_long_as_it_has_its_locks(node: Node) -> None:
    hidden, following = node.process(100, CONTAINER), node.process(200, HOST)
    assert hidden.take()
    assert not following.take()


def test_process_that_ends_while_it_hands_over_has_the_right_to_work_until_its_end(node: Node) -> None:
    """What it stops may still write."""
    driver, newer, is_slow = Driver.__new__(Driver), node.process(200), threading.Event()
    stub = SimpleNamespace(stop=no, withdraw=no, is_ready=no)
    vars(driver).update(
        health=SimpleNamespace(stream=stub), claims=SimpleNamespace(waiter=stub, admission=Admission()), probes=stub,
        _plugin=stub, _worker=node.process(100), _stopped=threading.Event(), _fatal=None,
        _works=True, _handed_over_at=None, _running=[Part("reconciler", stop=lambda: is_slow.wait(PATIENCE_S))],
    )  # fmt: skip
    driver._turns = BackgroundWorker("handover", driver._turn, lambda _: 0.0)
    driver._turns.join_s = 0.01
    assert driver._worker.take()
    newer.ask()
    driver._turns.start()
    eventually(lambda: driver._handed_over_at is not None)
    driver.stop()
    assert not newer.take()
    is_slow.set()
    eventually(newer.take)


class Calls:
    """What the kubelet's calls reach."""

    def __init__(self) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.seconds = 0.0
        self.admission, fetch = Admission(), SimpleNamespace(allocated=lambda ref, _call: claim(uid=ref.uid))
        parts: Any = (fetch, self._prepare, lambda _ref, _call: None, CallsUnderWay(), Outcomes())
        self.service = ClaimService(self.admission, *parts)

    def _prepare(self, attempt: PrepareAttempt) -> tuple[Prepared, None]:
        self.entered.set()
        self.seconds = attempt.call.left()
        assert self.may_end.wait(PATIENCE_S)
        return Prepared(()), None


def no(*_: object) -> bool:
    return False


def test_calls_wait_until_this_process_works() -> None:
    calls = Calls()
    calls.may_end.set()
    admission = calls.admission
    with ThreadPoolExecutor() as pool:
        prepared = pool.submit(calls.service.prepare, [CLAIM], 45.0, no)
        ended = pool.submit(calls.service.unprepare, [CLAIM], 45.0, no)
        assert not calls.entered.wait(0.1)
        admission.open()
        assert prepared.result(PATIENCE_S) == {CLAIM.uid: Prepared(())}
        assert ended.result(PATIENCE_S) == {CLAIM.uid: None}
    assert 40 < calls.seconds < 45


@pytest.mark.parametrize("reason", ["late", "cancelled", "over"])
def test_call_that_this_process_cannot_serve_is_to_be_retried(reason: str) -> None:
    calls = Calls()
    admission = calls.admission
    if reason == "over":
        admission.end()
    answer = calls.service.prepare([CLAIM], 2.05 if reason == "late" else 45.0, lambda: reason == "cancelled")
    failed = answer[CLAIM.uid]
    assert isinstance(failed, Failed)
    assert failed.error.endswith("has not handed over yet; the kubelet retries")
    assert not calls.entered.is_set()


def test_hand_over_waits_for_calls_in_progress_and_lets_no_new_one_in() -> None:
    calls = Calls()
    admission = calls.admission
    admission.open()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(calls.service.prepare, [CLAIM], 45.0, no)
        assert calls.entered.wait(PATIENCE_S)
        assert not admission.close(0.01)
        late = pool.submit(calls.service.unprepare, [CLAIM], 45.0, no)
        calls.may_end.set()
        assert admission.close(PATIENCE_S)
        assert running.result(PATIENCE_S) == {CLAIM.uid: Prepared(())}
        assert not late.done()
        admission.end()
        assert isinstance(late.result(PATIENCE_S)[CLAIM.uid], Failed)
