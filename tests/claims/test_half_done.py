"""What undoes a Prepare that was started and abandoned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.claims.calls import KubeletCall, PrepareAttempt
from dra_driver.claims.prepare import Preparer
from dra_driver.errors import NvmlTransientError, RetryableError
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import ClaimRef
from dra_driver.model.record import ClaimRecord
from tests.fakes.samples import GPU_0, claim, hold, plan, record

UID = "uid-1"
PLAN = plan(claim(GPU_0))
BEGUN = record(hold(GPU_0), uid=UID, phase="preparing")


class Scene:
    """A Prepare that was refused and waits; everything real but what the executor does."""

    def __init__(self, directory: Path) -> None:
        self.records = RecordStore(directory / "claims")
        self.records.open("boot-1")
        self.taken_back: list[ClaimRecord] = []
        unused: Any = None
        parts = (self.records, self, unused, self, unused)
        self.begun = Preparer(unused, *parts)  # type: ignore[arg-type]
        self.began_ns = time.monotonic_ns()
        self.attempt = self.wait()

    def wait(self) -> PrepareAttempt:
        """A Prepare is refused."""
        wanted = claim(GPU_0)
        attempt = PrepareAttempt(wanted.ref, KubeletCall(self.began_ns, time.monotonic() + 30), wanted)
        self.refuse(attempt)
        return attempt

    def refuse(self, attempt: PrepareAttempt) -> None:
        made = self.begun.begin(attempt, PLAN, self.records.get(UID))
        assert made is not None
        with pytest.raises(NvmlTransientError):
            self.begun.carry_out(attempt, PLAN, made)

    def intend(self, _plan: object, _known: object) -> ClaimRecord:
        self.records.save(BEGUN)
        return BEGUN

    def change(self, *_args: object) -> None:
        raise NvmlTransientError("the NVIDIA driver refuses for now")

    def remove(self, _ref: ClaimRef, found: ClaimRecord) -> None:
        with pytest.raises(RetryableError), self.records.locks.hold(UID, 0.01):
            pass  # the claim is locked during this
        self.taken_back.append(found)
        self.records.delete(found.ref.uid)

    def undo_rest(self, uid: str) -> None:
        with self.records.locks.hold(UID, 5):
            pass  # and no longer locked

    def wake(self) -> None:
        pass

    def give_up(self) -> None:
        self.begun.give_up(self.attempt, RetryableError("not today"))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def unprepared(scene: Scene) -> None:
    scene.records.delete(UID)


def prepared(scene: Scene) -> None:
    scene.begun._begun.pop(UID)
    scene.records.save(replace(BEGUN, phase="prepared"))


def refused_again(scene: Scene) -> None:
    """Another Prepare of the claim."""
    scene.wait()


@pytest.mark.parametrize("other_call", [unprepared, prepared, refused_again])
def test_changes_that_another_call_made_are_kept(scene: Scene, other_call: Callable[[Scene], None]) -> None:
    other_call(scene)
    before = scene.records.get(UID)
    scene.give_up()
    assert (scene.taken_back, scene.records.get(UID)) == ([], before)
    scene.give_up()
    assert scene.taken_back == []


def test_record_is_undone_as_it_is_on_disk(scene: Scene) -> None:
    found = replace(BEGUN, claim=replace(BEGUN.claim, results=()))
    scene.records.save(found)
    scene.give_up()
    assert (scene.taken_back, scene.records.get(UID)) == ([found], None)
    scene.give_up()
    assert len(scene.taken_back) == 1


def test_other_call_that_continues_during_the_wait_for_the_lock_keeps_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = scene.records.locks.hold

    def refused_first(uid: str, timeout_s: float) -> object:
        scene.wait()
        return lock(uid, timeout_s)

    monkeypatch.setattr(scene.records.locks, "hold", refused_first)
    scene.give_up()
    assert (scene.taken_back, scene.records.get(UID)) == ([], BEGUN)


def test_prepare_that_was_refused_last_takes_it_back(scene: Scene) -> None:
    second = scene.wait()
    scene.give_up()
    scene.refuse(scene.attempt)
    scene.begun.give_up(second, RetryableError("not today"))
    assert scene.taken_back == []
    scene.give_up()
    assert scene.taken_back == [BEGUN]
