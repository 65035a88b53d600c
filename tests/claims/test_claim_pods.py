"""The reconciler writes the pods of claims into their records."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.cli.state_on_disk import read_state
from dra_driver.errors import RetryableError, StateError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, PodRef, Pods
from tests.claims import test_reconciler
from tests.fakes.preparing import Node, in_threads
from tests.fakes.samples import GPU_0, GPU_1, claim
from tests.fakes.waiting import PATIENCE_S

A, B, C = (PodRef(f"trainer-{letter}", f"pod-uid-{letter}") for letter in "abc")
ONE, TWO = claim(GPU_0), claim(GPU_1, uid="uid-2")


def used_by(wanted: AllocatedClaim, *pods: PodRef) -> AllocatedClaim:
    return replace(wanted, pods=pods)


class Bench(test_reconciler.Bench):
    """A reconciler over a node that writes pods down, with a clock that tests turn."""

    def recorded(self, uid: str = "uid-1") -> Pods:
        record = self.node.records.get(uid)
        assert record is not None
        return record.claim.pods


@pytest.fixture
def bench(node: Node) -> Bench:
    return Bench(node)


# --- in the record ---------------------------------------------------------------------------------


def test_pods_that_come_and_go_without_a_call_are_written_down(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.node.prepare(used_by(ONE, A))
    bench.node.prepare(used_by(TWO, C))
    before = bench.node.records.get("uid-1")
    bench.node.claims.add(used_by(ONE, A, B))
    assert bench.look() is None
    assert (bench.recorded(), bench.recorded("uid-2")) == ((A, B), (C,))
    assert bench.node.records.get("uid-1") == before, "nothing else changed"
    others = {record.ref.uid: record.claim.pods for record in read_state(bench.node.directory).records}
    assert others == {"uid-1": (A, B), "uid-2": (C,)}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_args: pytest.fail("written though nothing changed"))
        assert bench.look() is None
    bench.node.claims.unused.add("uid-1")
    assert bench.look() is None
    assert bench.recorded() == ()
    assert bench.node.unprepare(ONE) is None
    assert bench.node.unprepare(TWO) is None
    assert bench.node.files() == {}


def test_pods_of_a_claim_that_is_stale_or_another_by_now_are_not_checked(bench: Bench) -> None:
    bench.node.prepare(used_by(ONE, A))
    bench.node.prepare(used_by(TWO, C))
    bench.node.claims.deallocated.add("uid-1")
    del bench.node.claims.allocated["uid-2"]
    bench.node.claims.allocated["new"] = AllocatedClaim(
        ClaimRef("default", TWO.ref.name, "new"), TWO.results, pods=(B,)
    )
    bench.node.claims.allocated["uid-1"] = used_by(ONE, B)
    bench.look()
    assert (bench.recorded(), bench.recorded("uid-2")) == ((A,), (C,))


def test_grace_time_continues_when_only_the_pods_of_a_record_changed(bench: Bench) -> None:
    bench.node.prepare(used_by(ONE, A))
    bench.node.claims.deallocated.add("uid-1")
    bench.look()
    record = bench.node.record_of()
    bench.node.records.save(replace(record, claim=used_by(ONE, A, B)))
    bench.now += 60
    bench.look()
    assert (bench.node.files(), bench.reported.recovered_claims) == (
        {},
        [("uid-1", "is no longer allocated")],
    )


# --- against the kubelet ---------------------------------------------------------------------------


def test_claim_that_was_unprepared_in_between_does_not_come_back(bench: Bench) -> None:
    bench.node.prepare(used_by(ONE, A))
    bench.node.claims.add(used_by(ONE, A, B))
    bench.during_the_look(lambda: bench.node.unprepare(ONE))
    assert bench.look() is None
    assert bench.node.files() == {}


def test_claim_that_is_being_unprepared_does_not_come_back(bench: Bench) -> None:
    """The record is still there while the reconciler wants to write it."""
    bench.node.prepare(used_by(ONE, A))
    bench.node.claims.add(used_by(ONE, A, B))
    undoing, looked = threading.Event(), threading.Event()

    def slowly(_ref: ClaimRef) -> None:
        undoing.set()
        assert looked.wait(PATIENCE_S)

    bench.node.steps.on_undo = slowly
    bench.during_the_look(looked.set)

    def look() -> object:
        assert undoing.wait(PATIENCE_S)
        return bench.look()

    assert in_threads(lambda: bench.node.unprepare(ONE), look) == [None, None]
    assert bench.node.files() == {}


def test_pods_of_a_prepare_after_the_check_stay(bench: Bench) -> None:
    bench.node.prepare(used_by(ONE, A))
    bench.node.claims.add(used_by(ONE, A, B))

    def prepare_again() -> None:
        bench.node.unprepare(ONE)
        bench.node.prepare(used_by(ONE, C))

    bench.during_the_look(prepare_again)
    assert bench.look() is None
    assert bench.recorded() == (C,)


def test_claim_that_moved_before_the_check_keeps_what_it_holds_now(bench: Bench) -> None:
    bench.node.prepare(used_by(ONE, A))
    seen = bench.node.record_of()
    bench.node.prepare(used_by(claim(GPU_1), A))
    moved = bench.node.records.get("uid-1")
    bench.reconciler._update_pods(seen, (A, B))
    assert bench.node.records.get("uid-1") == moved != seen
    assert bench.recorded() == (A, B)


def test_lock_or_disk_that_is_not_to_be_had_costs_nothing_but_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.node.prepare(used_by(ONE, A))
    bench.node.claims.add(used_by(ONE, A, B))
    seen = bench.node.record_of()

    tries: list[str] = []

    def busy(uid: str, timeout_s: float) -> object:
        tries.append(uid)
        assert timeout_s <= 1
        raise RetryableError("claim uid-1 is being worked on")

    def full(*_args: object, **_more: object) -> None:
        raise StateError("the disk is full")

    keep = bench.reconciler._update_pods
    with monkeypatch.context() as patch:
        patch.setattr(bench.node.records.locks, "hold", busy)
        keep(seen, (B,))
        assert tries == ["uid-1"]
        keep(seen, (A,))
        keep(seen, None)
    assert tries == ["uid-1"], "nobody is held up for what is written already"
    with monkeypatch.context() as patch:
        patch.setattr(bench.node.records, "save", full)
        assert bench.look() is None
    assert bench.recorded() == (A,)
    assert bench.look() is None
    assert bench.recorded() == (A, B)
