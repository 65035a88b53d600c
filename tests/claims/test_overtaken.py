"""Kubelet calls that get the lock of their claim in another order than they were made, or that the kubelet
has cancelled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dra_driver.claims.prepare import ClaimPlanner
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import Failed, Prepared
from tests.fakes.preparing import Claims, Node, error_of
from tests.fakes.samples import GPU_0, claim, result
from tests.fakes.waiting import PATIENCE_S

WANTED = claim(result(GPU_0), uid="uid-1")


class Barrier:
    """Replaces an instance's locks: callers wait here first, until they are released."""

    def __init__(self, locks: Any) -> None:
        self._locks = locks
        self.reached = threading.Event()
        self.let = threading.Event()

    @contextmanager
    def hold(self, *args: Any) -> Iterator[Any]:
        self.reached.set()
        assert self.let.wait(PATIENCE_S)
        with self._locks.hold(*args) as held:
            yield held


class Late:
    """A call in a thread that waits for one of the locks of a part."""

    def __init__(self, records: RecordStore, attribute: str, call: Callable[[], Any]) -> None:
        locks = getattr(records, attribute)
        self._barrier = Barrier(locks)
        setattr(records, attribute, self._barrier)
        self._answers: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(call()))
        self._thread.start()
        assert self._barrier.reached.wait(PATIENCE_S)
        setattr(records, attribute, locks)

    def answer(self) -> Any:
        self._barrier.let.set()
        self._thread.join(PATIENCE_S)
        return self._answers[0]


def unprepare(node: Node, **more: Any) -> Any:
    return node.service.unprepare([WANTED.ref], None, **more)[WANTED.ref.uid]


def test_unprepare_that_a_newer_prepare_overtook_undoes_nothing(node: Node) -> None:
    """Otherwise the device would be allocated again while the pod of the first claim runs."""
    assert isinstance(node.prepare(WANTED), Prepared)
    late = Late(node.records, "locks", lambda: unprepare(node))
    assert isinstance(node.prepare(WANTED), Prepared)
    before = node.files()
    assert "the claim was prepared again after this call began" in error_of(late.answer())
    assert node.files() == before
    assert unprepare(node) is None, "a call that begins now is meant"
    assert node.files() == {}


def test_prepare_that_was_unprepared_does_not_finish_the_record_of_a_newer_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Unprepare undid the steps of the older call, and those of the newer call are not done yet."""
    change, answers = node.executor.change, []
    waits, go_on = threading.Event(), threading.Event()
    newer = threading.Thread(target=lambda: answers.append(node.prepare(WANTED)))

    def overtake() -> None:
        assert unprepare(node) is None
        newer.start()
        assert waits.wait(20)

    def wait() -> None:
        waits.set()
        assert go_on.wait(20)

    turns = iter((overtake, wait))

    def changed(*given: Any) -> None:
        change(*given)
        next(turns)()

    monkeypatch.setattr(node.executor, "change", changed)
    assert "the claim was unprepared during this call" in error_of(node.prepare(WANTED))
    assert node.record_of().phase == "preparing"
    go_on.set()
    newer.join(20)
    assert isinstance(answers[0], Prepared)
    assert node.record_of().phase == "prepared"


def test_claim_that_was_prepared_again_after_the_api_server_was_queried_is_not_reclaimed(node: Node) -> None:
    """The record is the same before and after."""
    assert isinstance(node.prepare(WANTED), Prepared)
    known, checked_ns = node.record_of(), time.monotonic_ns()
    assert isinstance(node.prepare(WANTED), Prepared)
    assert node.record_of() == known
    assert not node.unpreparer.reclaim(WANTED.ref, known, checked_ns)
    assert node.record_of() == known
    assert node.unpreparer.reclaim(WANTED.ref, known, time.monotonic_ns())
    assert node.files() == {}


def test_prepare_continues_after_an_unprepare_that_is_older(node: Node) -> None:
    """It is the kubelet's last word; refused, it would come back in a minute or more."""
    assert isinstance(node.prepare(WANTED), Prepared)
    older = Late(node.records, "locks", lambda: unprepare(node))
    late = Late(node.records, "locks", lambda: node.prepare(WANTED))
    assert older.answer() is None
    assert isinstance(late.answer(), Prepared)
    assert node.records.get(WANTED.ref.uid) is not None


def test_unprepare_whose_caller_left_while_it_waited_undoes_nothing(node: Node) -> None:
    assert isinstance(node.prepare(WANTED), Prepared)
    before = node.files()
    left = threading.Event()
    late = Late(node.records, "locks", lambda: unprepare(node, is_cancelled=left.is_set))
    left.set()
    refused = late.answer()
    assert isinstance(refused, Failed)
    assert node.files() == before


def test_prepare_whose_caller_left_while_it_waited_leaves_nothing(node: Node) -> None:
    node.claims.add(WANTED)
    left = threading.Event()
    late = Late(
        node.records,
        "planning",
        lambda: node.service.prepare([WANTED.ref], None, left.is_set)[WANTED.ref.uid],
    )
    left.set()
    assert "cancelled this call" in error_of(late.answer())
    assert node.files() == {}


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Claims, "read"), (ClaimPlanner, "find_devices"), (ClaimPlanner, "refuse_unready_imex")],
)
def test_unprepare_while_prepare_waits_for_the_api_server_discovery_or_imex_does_not_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    reached, let, real = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*args: Any) -> Any:
        reached.set()
        assert let.wait(PATIENCE_S)
        return real(*args)

    monkeypatch.setattr(owner, name, slow)
    answers: list[Any] = []
    prepare = threading.Thread(target=lambda: answers.append(node.prepare(WANTED)))
    prepare.start()
    try:
        assert reached.wait(PATIENCE_S)
        with node.records.locks.hold(WANTED.ref.uid, 0.0):
            """Prepare does not hold it."""
        assert unprepare(node) is None
    finally:
        let.set()
        prepare.join(PATIENCE_S)
    assert isinstance(answers[0], Failed)
    assert "the claim was unprepared during this call" in answers[0].error
    assert node.files() == {}
    monkeypatch.undo()
    assert isinstance(node.prepare(WANTED), Prepared), "the next pod of the claim is served"
