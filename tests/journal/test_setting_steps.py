"""A setting of a GPU with a memory: what was there is noted, restored, and set again after a reload of the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import (
    ClaimRefusedError,
    DeviceLostError,
    DraDriverError,
    DriverGoneError,
    NotSupportedError,
    RetryableError,
    StateError,
)
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.rules.cleanups import LedgerEntry
from dra_driver.journal.setting_steps import SettingSteps
from dra_driver.model.dataclass import replace
from dra_driver.model.gpu import SettingBefore
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice
from tests.fakes.journal import Journaled
from tests.fakes.samples import claim

STEP, OTHER = SetTimeSlice("GPU-1", 3), SetTimeSlice("GPU-1", 2)
ENTRY = LedgerEntry(claim().ref, "boot-1", STEP)
PLAN, REF = Plan(claim(), (), ()), claim().ref


class Dimmer(SettingSteps[SetTimeSlice]):
    """A setting in memory that the driver reports, with values from 1 to 3; 1 at first."""

    def __init__(self, ledger: Ledger, rest: int | None = None) -> None:
        super().__init__(
            SetTimeSlice,
            ledger,
            otherwise="dim less",
            at_rest=SetTimeSlice("", rest or 0),
            has_rest_value=rest is not None,
            gpus=lambda: ["GPU-1"],
        )
        self.now, self.written = 1, list[int]()
        self.error: DraDriverError | None = None
        self.is_stuck = False

    def read(self, step: SetTimeSlice) -> int:
        if self.error is not None:
            raise self.error
        return self.now

    def write(self, step: SetTimeSlice, value: int) -> None:
        if value > 3:
            refused = ClaimRefusedError("too bright")
            refused.has_no_effect = True
            raise refused
        self.written.append(value)
        self.now = self.now if self.is_stuck else value

    def text(self, value: int) -> str:
        return f"{value} lm"

    @property
    def notes(self) -> list[SettingBefore]:
        return self._ledger.details(SettingBefore)


@pytest.fixture
def node(tmp_path: Path) -> Journaled:
    node = Journaled()
    node.open_journal(tmp_path, "boot-1")
    return node


@pytest.fixture
def dimmer(node: Journaled) -> Dimmer:
    return Dimmer(node.ledger)


def test_value_before_the_first_claim_is_restored(dimmer: Dimmer) -> None:
    dimmer.do(STEP, PLAN)
    dimmer.do(STEP, PLAN)
    dimmer.do(OTHER, PLAN)
    assert dimmer.notes == [SettingBefore("GPU-1", "boot-1", "set_time_slice", 1)]
    dimmer.undo(OTHER, REF)
    dimmer.undo(STEP, REF)
    assert (dimmer.written, dimmer.notes) == ([3, 2, 1], [])


def test_value_that_the_gpu_refuses_leaves_nothing(dimmer: Dimmer) -> None:
    with pytest.raises(ClaimRefusedError, match="too bright") as refused:
        dimmer.do(SetTimeSlice("GPU-1", 4), PLAN)
    assert refused.value.has_no_effect
    assert (dimmer.written, dimmer.notes) == ([], [])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (NotSupportedError("no such setting"), ClaimRefusedError),
        (RetryableError("not now"), RetryableError),
    ],
)
def test_value_that_cannot_be_read_is_not_changed(
    dimmer: Dimmer, error: DraDriverError, raised: type[DraDriverError]
) -> None:
    dimmer.error = error
    with pytest.raises(raised) as failed:
        dimmer.do(STEP, PLAN)
    assert failed.value.has_no_effect
    assert (dimmer.written, dimmer.notes) == ([], [])


def test_value_that_does_not_change_fails_the_step_and_its_undo(dimmer: Dimmer) -> None:
    dimmer.is_stuck = True
    with pytest.raises(RetryableError, match="the time slice of GPU GPU-1 is 1 lm, not 3 lm"):
        dimmer.do(STEP, PLAN)
    assert len(dimmer.notes) == 1
    dimmer.now = 3
    with pytest.raises(RetryableError, match="is 3 lm, not 1 lm"):
        dimmer.undo(STEP, REF)
    assert len(dimmer.notes) == 1, "the next undo needs it"


def test_claim_ends_without_the_driver_that_had_the_value(dimmer: Dimmer) -> None:
    dimmer.do(STEP, PLAN)
    dimmer.error = DriverGoneError("no driver")
    dimmer.undo(STEP, REF)
    assert dimmer.notes == []


def test_note_of_an_earlier_boot_is_void(dimmer: Dimmer, node: Journaled) -> None:
    dimmer.do(STEP, PLAN)
    later = Dimmer(Ledger(node.ledger.directory, node.records, "boot-2"))
    later.now = 2
    later.do(STEP, PLAN)
    later.undo(STEP, REF)
    assert later.written == [3, 2]


def reloaded(dimmer: Dimmer) -> None:
    dimmer.now = 1
    dimmer.driver_reloaded()
    for gpu in dimmer.gpus():
        dimmer.restore(gpu)
    assert dimmer.gpus() == set()


@pytest.mark.parametrize("is_done", [True, False])
def test_value_is_set_again_after_a_reload_if_its_step_had_begun(
    dimmer: Dimmer, node: Journaled, is_done: bool
) -> None:
    """Otherwise the step would note its own value as the one before."""
    node.records.save(ClaimRecord(claim(), "prepared", "boot-1", (), (STEP,)))
    if is_done:
        dimmer.do(STEP, PLAN)
    reloaded(dimmer)
    assert dimmer.written == [3, 3] * is_done


def test_failed_restore_is_tried_until_it_succeeds_and_logged_once(
    dimmer: Dimmer, node: Journaled, logs: list[dict[str, Any]]
) -> None:
    node.records.save(ClaimRecord(claim(), "prepared", "boot-1", (), (STEP,)))
    dimmer.do(STEP, PLAN)
    dimmer.driver_reloaded()
    dimmer.now, dimmer.error = 1, RetryableError("not now")
    for _ in range(2):
        assert dimmer.gpus() == {"GPU-1"}
        with pytest.raises(RetryableError):
            dimmer.restore("GPU-1")
    [problem] = dimmer.problems()
    assert (problem.code, problem.subject) == ("setting-lost", "GPU-1")
    assert problem.text == "cannot restore the time slice of GPU GPU-1: not now; gpu-dra-driver retries"
    dimmer.error = None
    dimmer.restore("GPU-1")
    assert dimmer.problems() == []
    assert (dimmer.now, dimmer.gpus()) == (3, set())
    assert [line["event"] for line in logs] == ["setting_lost", "setting_restored"]


def test_node_has_a_value_for_gpus_without_a_claim(node: Journaled) -> None:
    """It is set at the start and by the undo, a claim's value comes first, and a plugin without it restores the first
    value.
    """
    dimmer = Dimmer(node.ledger, rest=2)
    reloaded(dimmer)
    assert dimmer.written == [2]
    node.records.save(ClaimRecord(claim(), "prepared", "boot-1", (), (STEP,)))
    node.ledger.change([ENTRY], ())
    dimmer.do(STEP, PLAN)
    reloaded(dimmer)
    assert dimmer.now == 3
    node.records.delete(claim().ref.uid)
    node.ledger.change((), [ENTRY])
    dimmer.undo(STEP, REF)
    assert (dimmer.now, [note.value for note in dimmer.notes]) == (2, [1])
    later = Dimmer(node.ledger)
    later.now = dimmer.now
    later.driver_reloaded()
    later.restore(*later.gpus())
    assert (later.now, later.notes, later.gpus()) == (1, [], set())


def test_value_of_a_gpu_without_a_claim_waits_for_a_pending_undo(node: Journaled) -> None:
    dimmer = Dimmer(node.ledger, rest=2)
    node.ledger.change([ENTRY], ())
    reloaded(dimmer)
    assert dimmer.written == [], "the undo sets it"


def test_change_by_another_program_is_a_problem_until_the_value_is_right_again(dimmer: Dimmer) -> None:
    dimmer.polled("GPU-1", 1)
    dimmer.do(STEP, PLAN)
    for found, is_shown in [
        (1, False),
        (2, False),
        (2, True),
        (None, True),
        (3, False),
        (2, False),
        (2, True),
    ]:
        dimmer.polled("GPU-1", found)
        assert bool(dimmer.problems()) == is_shown, found
    [problem] = dimmer.problems()
    assert (problem.code, problem.subject) == ("setting-changed", "GPU-1")
    assert "the time slice of GPU GPU-1 from 3 lm to 2 lm" in problem.text
    assert dimmer.written == [3], "nothing fights with the other program"
    dimmer.undo(STEP, REF)
    dimmer.polled("GPU-1", 2)
    assert dimmer.problems() == []


def test_value_of_a_claim_of_an_earlier_boot_is_not_set_and_the_nodes_value_is(node: Journaled) -> None:
    """Its pod may never come back, and nothing of this boot would undo it."""
    node.records.save(ClaimRecord(claim(), "prepared", "boot-0", (), (STEP,)))
    node.ledger.change([replace(ENTRY, boot_id="boot-0")], ())
    dimmer = Dimmer(node.ledger, rest=2)
    reloaded(dimmer)
    assert dimmer.written == [2]


def test_claim_that_is_not_prepared_yet_gets_its_value_only_from_prepare(
    node: Journaled, dimmer: Dimmer
) -> None:
    dimmer.do(OTHER, PLAN)
    node.records.save(ClaimRecord(claim(), "preparing", "boot-1", (), (STEP,)))
    reloaded(dimmer)
    assert dimmer.written == [2]


def test_problem_of_a_gpu_that_is_not_polled_any_more_ends_with_the_claim(dimmer: Dimmer) -> None:
    dimmer.do(STEP, PLAN)
    for _ in range(2):
        dimmer.polled("GPU-1", 2)
    assert dimmer.problems()
    dimmer.undo(STEP, REF)
    assert dimmer.problems() == []


def test_lost_gpu_without_a_claim_has_its_own_problem_and_none_of_this(node: Journaled) -> None:
    dimmer = Dimmer(node.ledger, rest=2)
    dimmer.error = DeviceLostError("no answer")
    dimmer.driver_reloaded()
    for gpu in dimmer.gpus():
        dimmer.restore(gpu)
    assert (dimmer.gpus(), dimmer.problems()) == (set(), [])


def test_reload_is_not_forgotten_when_the_ledgers_cannot_be_read(
    node: Journaled, dimmer: Dimmer, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.records.save(ClaimRecord(claim(), "prepared", "boot-1", (), (STEP,)))
    dimmer.do(STEP, PLAN)
    dimmer.driver_reloaded()
    with monkeypatch.context() as broken:
        broken.setattr(node.ledger, "details", raising(StateError("no ledger")))
        with pytest.raises(StateError):
            dimmer.gpus()
    assert dimmer.gpus() == {"GPU-1"}


def raising(error: Exception) -> Any:
    def fail(*_arguments: object) -> Any:
        raise error

    return fail
