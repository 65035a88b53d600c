from __future__ import annotations

from dataclasses import replace

import pytest

from dra_driver.core.planning import Plan, plan_claim
from dra_driver.errors import StateError
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice, Step, WriteCdiSpec
from dra_driver.services.executor import Executor, changes_more_than_the_spec
from tests.core.samples import DRIVER, GPU_0, GPU_1, MIXED, NODE, claim, hold


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
    return Executor(journal, journal, "boot-1", now=lambda: "now", must_last=lambda plan: True)


def test_intention_is_on_the_disk_before_the_first_step(executor: Executor, journal: Journal) -> None:
    assert executor.carry_out(planned(GPU_0), None) == record()
    assert journal.events == ["save preparing", "do", "save prepared lightly"]
    assert journal.kept == {"uid-1": record()}


def test_steps_run_again_without_a_write_when_the_claim_is_prepared(
    executor: Executor, journal: Journal
) -> None:
    assert executor.carry_out(planned(GPU_0), record()) == record()
    assert journal.events == ["do"]


def test_half_done_claim_is_finished(executor: Executor, journal: Journal) -> None:
    half = record("preparing", at=None)
    assert executor.carry_out(planned(GPU_0), half) == record()
    assert journal.events == ["do", "save prepared lightly"]


def test_time_of_the_first_prepare_is_kept_after_a_reboot(executor: Executor, journal: Journal) -> None:
    old = record(boot="boot-0", at="then")
    assert executor.carry_out(planned(GPU_0), old) == record(at="then")
    assert journal.events[:2] == ["save prepared", "do"]


def test_failed_step_of_a_new_claim_is_taken_back(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.carry_out(planned(GPU_0), None)
    assert journal.events == ["save preparing", "do", "undo", "delete"]
    assert journal.kept == {}


def test_failed_step_of_a_prepared_claim_takes_nothing_back(executor: Executor, journal: Journal) -> None:
    journal.failing["do"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.carry_out(planned(GPU_0), record())
    assert journal.events == ["do"]


def test_nothing_is_done_when_the_intention_cannot_be_written(executor: Executor, journal: Journal) -> None:
    journal.failing["save preparing"] = StateError("the disk is full")
    with pytest.raises(StateError, match="the disk is full"):
        executor.carry_out(planned(GPU_0), None)
    assert journal.events == ["save preparing"]


def test_error_of_the_step_is_the_one_that_is_told_when_the_undo_fails_too(
    executor: Executor, journal: Journal, logs: list
) -> None:
    journal.failing |= {"do": StateError("first"), "undo": StateError("second")}
    with pytest.raises(StateError, match="first"):
        executor.carry_out(planned(GPU_0), None)
    assert journal.kept == {"uid-1": record("preparing", at=None)}
    assert [(line["event"], line["reason"]) for line in logs] == [("rollback_incomplete", "second")]


def test_record_stays_when_an_undo_fails(executor: Executor, journal: Journal) -> None:
    journal.failing["undo"] = StateError("no")
    with pytest.raises(StateError, match="no"):
        executor.take_back(record())
    assert journal.events == ["undo"]


def test_undo_comes_before_the_record_is_removed(executor: Executor, journal: Journal) -> None:
    executor.take_back(record())
    assert journal.events == ["undo", "delete"]


@pytest.mark.parametrize(
    ("known", "expected"),
    [(record(), True), (record("preparing"), False), (record(boot="boot-0"), False)],
)
def test_claim_is_in_place_when_it_was_prepared_in_this_boot(
    executor: Executor, journal: Journal, known: ClaimRecord, expected: bool
) -> None:
    journal.events.append("do")
    assert executor.in_place(known) is expected


def test_claim_is_not_in_place_when_a_step_is_gone(executor: Executor) -> None:
    assert not executor.in_place(record())


def test_claim_with_other_devices_is_preparing_again(executor: Executor, journal: Journal) -> None:
    made = executor.carry_out(planned(GPU_1), record())
    assert journal.events == ["save preparing", "do", "save prepared lightly"]
    assert made == replace(record(), claim=claim(GPU_1), devices=(hold(GPU_1),))


def test_fields_of_a_newer_release_are_kept(executor: Executor, journal: Journal) -> None:
    newer = replace(record("preparing"), extra={"future": 1})
    assert executor.carry_out(planned(GPU_0), newer).extra == {"future": 1}


def test_record_is_synced_only_when_a_step_changes_more_than_the_spec() -> None:
    plan = planned(GPU_0)
    assert not changes_more_than_the_spec(plan)
    assert changes_more_than_the_spec(replace(plan, steps=(SetTimeSlice("GPU-1", 2), *plan.steps)))
    journal = Journal()
    Executor(journal, journal, "boot-1", now=lambda: "now").carry_out(plan, None)
    assert journal.events == ["save preparing lightly", "do", "save prepared lightly"]
