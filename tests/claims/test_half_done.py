"""Who takes back what a Prepare has begun and gives up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.claims.attempt_steps import AttemptSteps
from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.rules.plan import plan_claim
from dra_driver.claims.waiting_line import PrepareAttempt
from dra_driver.errors import NvmlTransientError, RetryableError
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.gpu_locks import HeldGpus
from dra_driver.journal.records import RecordStore
from dra_driver.model.record import ClaimRecord
from tests.fakes.samples import DRIVER, GPU_0, MIXED, NODE, claim, hold, record

UID = "uid-1"
PLAN = plan_claim(claim(GPU_0), MIXED, NODE, DRIVER, ())
BEGUN = record(hold(GPU_0), uid=UID, phase="preparing")


class Scene:
    """A Prepare that was refused and waits; everything real but the undo."""

    def __init__(self, directory: Path) -> None:
        self.records = RecordStore(directory / "claims")
        self.records.open("boot-1")
        (directory / "locks").mkdir()
        self.claim_locks = ClaimLocks(directory / "locks")
        self.taken_back: list[ClaimRecord] = []
        self.locked: list[frozenset[str]] = []
        self.lock_error: Exception | None = None
        self.begun = AttemptSteps(self.records, self, self.claim_locks, self, None)  # type: ignore[arg-type]
        self.began_ns = time.monotonic_ns()
        self.attempt = self.wait()

    def wait(self) -> PrepareAttempt:
        """A Prepare is refused."""
        wanted = claim(GPU_0)
        attempt = PrepareAttempt(wanted.ref, KubeletCall(self.began_ns, 0.0), wanted)
        self.records.save(BEGUN)
        self.refuse(attempt)
        return attempt

    def refuse(self, attempt: PrepareAttempt) -> None:
        with pytest.raises(NvmlTransientError):
            self.begun.carry_out(attempt, PLAN, None, HeldGpus())

    def carry_out(self, *_args: object, **_options: object) -> None:
        raise NvmlTransientError("the NVIDIA driver refuses for now")

    @contextmanager
    def hold(self, gpu_uuids: frozenset[str], timeout_s: float) -> Iterator[HeldGpus]:
        if self.lock_error is not None:
            raise self.lock_error
        self.locked.append(gpu_uuids)
        yield HeldGpus()
        self.locked.pop()

    def roll_back(self, found: ClaimRecord, _held: HeldGpus) -> None:
        assert self.locked == [found.gpu_uuids]
        self.taken_back.append(found)
        self.records.delete(found.ref.uid)

    def give_up(self) -> None:
        self.begun.give_up(self.attempt)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def unprepared(scene: Scene) -> None:
    """In this process."""
    scene.begun.end(UID)
    scene.records.delete(UID)


def unprepared_elsewhere_and_begun_anew(scene: Scene) -> None:
    with scene.claim_locks.hold(UID, 5) as turn:
        turn.note_unprepared()


def prepared_elsewhere(scene: Scene) -> None:
    scene.records.save(replace(BEGUN, phase="prepared"))


def prepared(scene: Scene) -> None:
    scene.begun.end(UID)
    prepared_elsewhere(scene)


def unprepared_elsewhere(scene: Scene) -> None:
    scene.records.delete(UID)


def refused_again(scene: Scene) -> None:
    """Another Prepare of the claim."""
    scene.wait()


@pytest.mark.parametrize(
    "meanwhile",
    [unprepared, unprepared_elsewhere, unprepared_elsewhere_and_begun_anew, prepared, prepared_elsewhere,
     refused_again],
)  # fmt: skip
def test_what_others_did_meanwhile_is_left_alone(scene: Scene, meanwhile: Callable[[Scene], None]) -> None:
    meanwhile(scene)
    before = scene.records.get(UID)
    scene.give_up()
    assert (scene.taken_back, scene.records.get(UID)) == ([], before)
    scene.give_up()
    assert scene.taken_back == []


def test_record_is_taken_back_as_it_is_on_disk(scene: Scene) -> None:
    found = replace(BEGUN, claim=replace(BEGUN.claim, results=()))
    scene.records.save(found)
    scene.give_up()
    assert (scene.taken_back, scene.records.get(UID)) == ([found], None)
    scene.give_up()
    assert scene.taken_back == [found]


def test_another_that_goes_on_while_the_lock_is_waited_for_keeps_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = scene.claim_locks.hold

    def refused_first(uid: str, timeout_s: float) -> object:
        scene.wait()
        return lock(uid, timeout_s)

    monkeypatch.setattr(scene.claim_locks, "hold", refused_first)
    scene.give_up()
    assert (scene.taken_back, scene.records.get(UID)) == ([], BEGUN)


def test_who_began_nothing_takes_no_lock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.begun.end(UID)
    monkeypatch.setattr(scene.claim_locks, "hold", None)
    scene.give_up()
    assert scene.records.get(UID) == BEGUN


def test_last_of_two_prepares_takes_it_back(scene: Scene) -> None:
    second = scene.wait()
    scene.give_up()
    assert scene.taken_back == []
    scene.begun.give_up(second)
    assert scene.taken_back == [BEGUN]


def test_first_of_two_may_go_on_again(scene: Scene) -> None:
    second = scene.wait()
    scene.refuse(scene.attempt)
    scene.begun.give_up(second)
    assert scene.taken_back == []
    scene.give_up()
    assert scene.taken_back == [BEGUN]


def test_claim_is_locked_while_it_is_taken_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(found: ClaimRecord, _held: HeldGpus) -> None:
        with pytest.raises(RetryableError), scene.claim_locks.hold(UID, 0.01):
            pass
        scene.taken_back.append(found)

    monkeypatch.setattr(scene, "roll_back", look)
    scene.give_up()
    assert scene.taken_back == [BEGUN]


def test_record_stays_for_the_next_call_when_a_lock_is_not_to_be_had(scene: Scene, logs: list) -> None:
    scene.lock_error = RetryableError("GPU x is locked")
    scene.give_up()
    assert scene.records.get(UID) == BEGUN
    assert [(line["event"], line["claim_uid"], line["reason"]) for line in logs] == [
        ("rollback_incomplete", UID, "GPU x is locked")
    ]
