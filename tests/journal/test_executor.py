from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import RetryableError, StateError
from dra_driver.journal.executor import Executor, changes_more_than_the_spec
from dra_driver.journal.lanes import GpuUnresponsiveError, Lanes
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.rules.cleanups import LedgerEntry
from dra_driver.model.claim import ClaimRef
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice, Step, WriteCdiSpec
from tests.fakes.samples import GPU_0, GPU_1, claim, hold, plan
from tests.fakes.waiting import PATIENCE_S


class Journal:
    """Records and steps in memory, and the order in which they happen."""

    def __init__(self) -> None:
        self.kept: dict[str, ClaimRecord] = {}
        self.events: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.ledger = self
        self.entries: list[LedgerEntry] = []

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event in self.failing:
            raise self.failing[event]

    def save(self, record: ClaimRecord, *, durable: bool = True, whole: bool = True) -> None:
        self._note(f"save {record.phase}{'' if durable else ' lightly'}")
        self.kept[record.ref.uid] = record

    def delete(self, uid: str) -> None:
        self._note("delete")
        self.kept.pop(uid, None)

    def get(self, uid: str) -> ClaimRecord | None:
        return self.kept.get(uid)

    def add(self, entry: LedgerEntry) -> bool:
        self.entries.append(entry)
        return True

    def change(self, _changed: object, gone: Iterable[LedgerEntry]) -> None:
        for entry in gone:
            self.entries.remove(entry)

    def removing(self, uid: str) -> AbstractContextManager[None]:
        return nullcontext()

    def undo_rest(self, uid: str, wait_s: float) -> None:
        self._note("undo rest")

    def do(self, step: Step, plan: Plan) -> None:
        self._note("do")

    def undo(self, step: Step, ref: ClaimRef) -> None:
        self._note("undo")

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return "do" in self.events


PLAIN = plan(claim(GPU_0))
SLICED = replace(PLAIN, steps=(SetTimeSlice("GPU-1", 2), *PLAIN.steps))


def record(phase: str = "prepared", boot: str = "boot-1", at: str | None = "now") -> ClaimRecord:
    return ClaimRecord(claim(GPU_0), phase, boot, (hold(GPU_0),), (WriteCdiSpec(),), at)  # type: ignore[arg-type]


def executor_over(journal: Any) -> Executor:
    lanes = Lanes(GpuLocks(Path("/nowhere")))  # of which no step here needs one
    return Executor(journal, journal, journal, lanes, "boot-1", now=lambda: "now")


def carried_out(executor: Executor, plan: Plan, known: ClaimRecord | None) -> ClaimRecord:
    """As Prepare does, without the locks."""
    if known is not None:
        executor.records.kept[known.ref.uid] = known  # type: ignore[attr-defined]
    record = executor.intend(plan, known)
    try:
        executor.change(plan, record)
        return executor.complete(plan, record)
    except StateError:
        if record.phase != "prepared":
            executor.remove(record.ref, record)
            executor.undo_rest(record.ref.uid)
        raise


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def executor(journal: Journal) -> Executor:
    return executor_over(journal)


def test_intention_is_on_the_disk_before_the_first_step(executor: Executor, journal: Journal) -> None:
    assert carried_out(executor, PLAIN, None) == record()
    assert journal.events == ["save preparing lightly", "do", "save prepared lightly"]
    assert journal.kept == {"uid-1": record()}


def test_steps_run_again_without_a_write_when_the_claim_is_prepared(
    executor: Executor, journal: Journal
) -> None:
    assert carried_out(executor, PLAIN, record()) == record()
    assert journal.events == ["do"]


def test_half_done_claim_is_finished(executor: Executor, journal: Journal) -> None:
    half = record("preparing", at=None)
    assert carried_out(executor, PLAIN, half) == record()
    assert journal.events == ["do", "save prepared lightly"]


def test_time_of_the_first_prepare_is_kept_after_a_reboot(executor: Executor, journal: Journal) -> None:
    old = record(boot="boot-0", at="then")
    assert carried_out(executor, PLAIN, old) == record(at="then")
    assert journal.events[:2] == ["save prepared lightly", "do"]


class Crowd(Journal):
    """Steps that last until `open` is set; `most` is how many were under way at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.open = threading.Event()
        self.entered, self.inside, self.most = 0, 0, 0

    def do(self, step: Step, plan: Plan) -> None:
        with self.changed:
            self.entered, self.inside = self.entered + 1, self.inside + 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
        assert self.open.wait(PATIENCE_S)
        with self.changed:
            self.inside -= 1

    def wait_for(self, entered: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.entered == entered, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("turn_s", "at_once"),
    [(30.0, 1), (0.0, 8)],
    ids=["files are written in turn", "but nobody waits long for one that hangs"],
)
def test_calls_that_come_together(turn_s: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.journal.executor._TURN_S", turn_s)
    crowd = Crowd()
    executor = executor_over(crowd)
    plans = [plan(claim(GPU_0, uid=f"uid-{n}")) for n in range(8)]
    with ThreadPoolExecutor(len(plans)) as pool:
        done = [pool.submit(carried_out, executor, one, None) for one in plans]
        crowd.wait_for(at_once)
        crowd.open.set()
        assert [one.result().phase for one in done] == ["prepared"] * len(plans)
    assert (crowd.most, crowd.entered) == (at_once, len(plans))


def test_failed_step_of_a_new_claim_is_undone(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        carried_out(executor, PLAIN, None)
    assert journal.events == ["save preparing lightly", "do", "undo", "delete", "undo rest"]
    assert journal.kept == {}
    assert not executor._turn.locked()


def test_failed_step_of_a_prepared_claim_undoes_nothing(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        carried_out(executor, PLAIN, record())
    assert journal.events == ["do"]


def test_nothing_is_done_for_a_record_that_another_call_has_changed(
    executor: Executor, journal: Journal, tmp_path: Path
) -> None:
    """An Unprepare removed it while this Prepare waited, and a newer Prepare may have written another one."""
    executor.lanes = Lanes(GpuLocks(tmp_path))
    meant = executor.intend(SLICED, None)
    for now in (None, replace(meant, steps=meant.steps[1:])):
        journal.kept = {} if now is None else {"uid-1": now}
        for work in (executor.change, executor.complete):
            with pytest.raises(RetryableError, match="another call changed the claim"):
                work(SLICED, meant)
    assert journal.events == ["save preparing"]


class SlowDisk(Journal):
    """The record is read, and the answer takes until `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def get(self, uid: str) -> ClaimRecord | None:
        found = super().get(uid)
        assert self.open.wait(PATIENCE_S)
        return found


@pytest.fixture
def slow(tmp_path: Path) -> tuple[SlowDisk, Executor]:
    disk = SlowDisk()
    executor = executor_over(disk)
    executor.lanes = Lanes(GpuLocks(tmp_path))
    return disk, executor


def test_step_that_begins_when_the_call_gives_up_is_undone(slow: tuple[SlowDisk, Executor]) -> None:
    disk, executor = slow
    record = executor.intend(SLICED, None)
    for seconds in (0.51, 1.0, 5.0, 20.0):  # on a busy machine, the step may not have begun by then
        with pytest.raises(RetryableError, match="has not finished; the kubelet's deadline has passed"):
            executor.change(SLICED, record, seconds)
        if disk.entries:
            break
    assert [entry.step for entry in disk.entries] == [SLICED.steps[0]]
    disk.open.set()


@pytest.mark.parametrize(
    ("usual_s", "timeout_s", "said"),
    [
        (60.0, 0.51, "has not finished; the kubelet's deadline has passed"),
        (0.0, 30, "GPU-1 does not respond: a step that hangs began at"),
        (0.2, 30, "GPU-1 does not respond: a step that hangs began at"),
    ],
)
def test_claim_behind_a_step_that_hangs_is_refused_and_its_own_step_never_begins(
    slow: tuple[SlowDisk, Executor],
    monkeypatch: pytest.MonkeyPatch,
    usual_s: float,
    timeout_s: float,
    said: str,
) -> None:
    """A hang in its first minute would cost each claim behind it the kubelet's whole time."""
    monkeypatch.setattr("dra_driver.journal.executor._CHECK_S", 0.01)
    monkeypatch.setattr("dra_driver.journal.executor._USUAL_S", usual_s)
    disk, executor = slow
    record = executor.intend(SLICED, None)
    hangs = executor.lanes.submit({"GPU-1"}, "a step that hangs", lambda _: disk.open.wait(PATIENCE_S))
    while not executor.lanes.hanging():
        pass
    with pytest.raises(RetryableError, match=said) as caught:
        executor.change(SLICED, record, timeout_s)
    assert isinstance(caught.value, GpuUnresponsiveError) == (timeout_s == 30)
    disk.open.set()
    hangs.result()
    executor.lanes.submit({"GPU-1"}, "the last one", lambda _: None).result()
    assert disk.entries == []


def test_nothing_is_done_when_the_intention_cannot_be_written(executor: Executor, journal: Journal) -> None:
    journal.failing["save preparing lightly"] = StateError("the disk is full")
    with pytest.raises(StateError, match="the disk is full"):
        carried_out(executor, PLAIN, None)
    assert journal.events == ["save preparing lightly"]


def test_record_stays_when_an_undo_fails(executor: Executor, journal: Journal) -> None:
    journal.failing["undo"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.remove(record().ref, record())
    assert journal.events == ["undo"]


@pytest.mark.parametrize(
    ("known", "events", "expected"),
    [
        (record(), ["do"], True),
        (record("preparing"), ["do"], False),
        (record(boot="boot-0"), ["do"], False),
        (record(), [], False),
    ],
    ids=["all is there", "half done", "older boot", "a step is gone"],
)
def test_claim_is_in_place_when_it_was_prepared_in_this_boot(
    executor: Executor, journal: Journal, known: ClaimRecord, events: list[str], expected: bool
) -> None:
    journal.events += events
    assert executor.in_place(known) is expected


def test_claim_with_other_devices_is_preparing_again(executor: Executor, journal: Journal) -> None:
    made = carried_out(executor, plan(claim(GPU_1)), record())
    assert journal.events == ["save preparing lightly", "do", "save prepared lightly"]
    assert made == replace(record(), claim=claim(GPU_1), devices=(hold(GPU_1),))


def test_record_is_synced_only_when_a_step_changes_more_than_the_spec() -> None:
    assert not changes_more_than_the_spec(PLAIN)
    assert changes_more_than_the_spec(SLICED)
