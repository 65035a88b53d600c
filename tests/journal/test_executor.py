from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dra_driver.claims.rules.plan import plan_claim
from dra_driver.errors import DeviceBusyError, NvmlTransientError, NvmlUnknownOutcomeError, StateError
from dra_driver.journal.executor import Executor, changes_more_than_the_spec
from dra_driver.journal.gpu_locks import HeldGpus
from dra_driver.journal.rules.debts import Debt
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice, Step, WriteCdiSpec
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIXED, NODE, claim, hold


class Journal:
    """Records and steps in memory, and the order in which they happen."""

    def __init__(self) -> None:
        self.kept: dict[str, ClaimRecord] = {}
        self.events: list[str] = []
        self.failing: dict[str, Exception] = {}

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

    def begin(self, record: ClaimRecord) -> Debt:
        self._note("begin debt")
        self.kept.pop(record.ref.uid, None)
        return Debt(record.ref.uid, record, record.steps, 0)

    def let_go(self, name: str) -> None:
        self._note("let go")

    def end(self, debt: Debt) -> None:
        self._note("end debt")

    def keep(self, debt: Debt, steps: Sequence[Step], cause: str) -> None:
        self._note(f"owe {', '.join(type(step).__name__ for step in steps)}: {cause}")

    def do(self, step: Step, plan: Plan) -> None:
        self._note("do")

    def undo(self, step: Step, record: ClaimRecord) -> None:
        self._note("undo")

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return "do" in self.events

    def forget(self, claim_uid: str) -> None:
        self._note("forget")


def planned(*names: str) -> Plan:
    return plan_claim(claim(*names), MIXED, NODE, DRIVER, ())


def record(phase: str = "prepared", boot: str = "boot-1", at: str | None = "now") -> ClaimRecord:
    return ClaimRecord(claim(GPU_0), phase, boot, (hold(GPU_0),), (WriteCdiSpec(),), at)  # type: ignore[arg-type]


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def executor(journal: Journal) -> Executor:
    return Executor(journal, journal, journal, "boot-1", now=lambda: "now", must_last=lambda plan: True)


def test_intention_is_on_the_disk_before_the_first_step(executor: Executor, journal: Journal) -> None:
    assert executor.carry_out(planned(GPU_0), None, HeldGpus()) == record()
    assert journal.events == ["save preparing", "do", "save prepared lightly"]
    assert journal.kept == {"uid-1": record()}


def test_steps_run_again_without_a_write_when_the_claim_is_prepared(
    executor: Executor, journal: Journal
) -> None:
    assert executor.carry_out(planned(GPU_0), record(), HeldGpus()) == record()
    assert journal.events == ["do"]


def test_half_done_claim_is_finished(executor: Executor, journal: Journal) -> None:
    half = record("preparing", at=None)
    assert executor.carry_out(planned(GPU_0), half, HeldGpus()) == record()
    assert journal.events == ["do", "save prepared lightly"]


def test_time_of_the_first_prepare_is_kept_after_a_reboot(executor: Executor, journal: Journal) -> None:
    old = record(boot="boot-0", at="then")
    assert executor.carry_out(planned(GPU_0), old, HeldGpus()) == record(at="then")
    assert journal.events[:2] == ["save prepared", "do"]


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
        assert self.open.wait(30)
        with self.changed:
            self.inside -= 1

    def wait_for(self, entered: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.entered == entered, timeout=30)


@pytest.mark.parametrize(
    ("lasts", "turn_s", "at_once"),
    [(False, 30.0, 1), (False, 0.0, 8), (True, 30.0, 8)],
    ids=[
        "files are written in turn",
        "but nobody waits long for one that hangs",
        "what takes long never waits",
    ],
)
def test_calls_that_come_together(*, lasts: bool, turn_s: float, at_once: int) -> None:
    crowd = Crowd()
    executor = Executor(crowd, crowd, crowd, "boot-1", must_last=lambda plan: lasts, turn_s=turn_s)
    plans = [plan_claim(claim(GPU_0, uid=f"uid-{n}"), MIXED, NODE, DRIVER, ()) for n in range(8)]
    with ThreadPoolExecutor(len(plans)) as pool:
        done = [pool.submit(executor.carry_out, plan, None, HeldGpus()) for plan in plans]
        crowd.wait_for(at_once)
        crowd.open.set()
        assert [one.result().phase for one in done] == ["prepared"] * len(plans)
    assert (crowd.most, crowd.entered) == (at_once, len(plans))


def test_the_turn_passes_on_when_a_step_fails(journal: Journal) -> None:
    executor = Executor(journal, journal, journal, "boot-1", turn_s=30.0)
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.carry_out(planned(GPU_0), None, HeldGpus())
    journal.failing.clear()
    assert executor.carry_out(planned(GPU_0), None, HeldGpus()).phase == "prepared"
    assert not executor._turn.locked()


def test_failed_step_of_a_new_claim_is_taken_back(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.carry_out(planned(GPU_0), None, HeldGpus())
    assert journal.events == ["save preparing", "do", "undo", "delete"]
    assert journal.kept == {}


@pytest.mark.parametrize("refusal", [NvmlTransientError("not now"), NvmlUnknownOutcomeError("timeout")])
@pytest.mark.parametrize("known", [None, record("preparing", at=None)])
def test_what_is_tried_again_stays_as_it_is_until_it_is_given_up(
    executor: Executor, journal: Journal, refusal: Exception, known: ClaimRecord | None
) -> None:
    journal.failing["do"] = refusal
    with pytest.raises(type(refusal)):
        executor.carry_out(planned(GPU_0), known, HeldGpus(), tries_again=True)
    begun = record("preparing", at=None)
    assert journal.events == [*(["save preparing"] if known is None else []), "do"]
    journal.kept["uid-1"] = begun
    executor.roll_back(begun, HeldGpus())
    assert (journal.events[-2:], journal.kept) == (["undo", "delete"], {})


@pytest.mark.parametrize("error", [StateError("no"), DeviceBusyError("in use")])
@pytest.mark.parametrize("known", [None, record("preparing", at=None)])
def test_what_does_not_pass_is_taken_back_although_it_is_tried_again(
    executor: Executor, journal: Journal, error: Exception, known: ClaimRecord | None
) -> None:
    journal.failing["do"] = error
    with pytest.raises(type(error)):
        executor.carry_out(planned(GPU_0), known, HeldGpus(), tries_again=True)
    assert journal.events[-3:] == ["do", "undo", "delete"]


def test_refusal_takes_everything_back_if_nobody_tries_again(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = NvmlTransientError("not now")
    with pytest.raises(NvmlTransientError):
        executor.carry_out(planned(GPU_0), None, HeldGpus())
    assert journal.events[-2:] == ["undo", "delete"]


def test_failed_step_of_a_prepared_claim_takes_nothing_back(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.carry_out(planned(GPU_0), record(), HeldGpus())
    assert journal.events == ["do"]


def test_nothing_is_done_when_the_intention_cannot_be_written(executor: Executor, journal: Journal) -> None:
    journal.failing["save preparing"] = StateError("the disk is full")
    with pytest.raises(StateError, match="the disk is full"):
        executor.carry_out(planned(GPU_0), None, HeldGpus())
    assert journal.events == ["save preparing"]


def test_error_of_the_step_is_the_one_that_is_told_when_the_undo_fails_too(
    executor: Executor, journal: Journal, logs: list
) -> None:
    journal.failing |= {"do": StateError("first"), "undo": StateError("second")}
    with pytest.raises(StateError, match="first"):
        executor.carry_out(planned(GPU_0), None, HeldGpus())
    assert journal.kept == {"uid-1": record("preparing", at=None)}
    assert [(line["event"], line["reason"]) for line in logs] == [("rollback_incomplete", "second")]


def test_record_stays_when_an_undo_fails(executor: Executor, journal: Journal) -> None:
    journal.failing["undo"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.take_back(record(), HeldGpus())
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
    made = executor.carry_out(planned(GPU_1), record(), HeldGpus())
    assert journal.events == ["save preparing", "do", "save prepared lightly"]
    assert made == replace(record(), claim=claim(GPU_1), devices=(hold(GPU_1),))


def test_record_is_synced_only_when_a_step_changes_more_than_the_spec() -> None:
    plan = planned(GPU_0)
    assert not changes_more_than_the_spec(plan)
    assert changes_more_than_the_spec(replace(plan, steps=(SetTimeSlice("GPU-1", 2), *plan.steps)))
    journal = Journal()
    Executor(journal, journal, journal, "boot-1", now=lambda: "now").carry_out(plan, None, HeldGpus())
    assert journal.events == ["save preparing lightly", "do", "save prepared lightly"]
