"""A setting of a GPU with a memory: what was there is noted, restored, and set again after a reload of the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import (
    ClaimRefusedError,
    DraDriverError,
    DriverGoneError,
    NotSupportedError,
    RetryableError,
)
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.setting_steps import SettingSteps
from dra_driver.model.gpu import SettingBefore
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice
from tests.fakes.journal import Journaled
from tests.fakes.samples import claim

STEP, OTHER = SetTimeSlice("GPU-1", 3), SetTimeSlice("GPU-1", 2)
PLAN, REF = Plan(claim(), (), ()), claim().ref


class Dimmer(SettingSteps[SetTimeSlice]):
    """A setting in memory that the driver reports, with values from 1 to 3; 1 at first."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(
            SetTimeSlice,
            ledger,
            default=None,
            otherwise="dim less",
            set_again_event="set_again",
            lost_event="lost",
            gone_event="gone",
        )
        self.now, self.written = 1, list[int]()
        self.error: DraDriverError | None = None
        self.is_stuck = False

    def bounds(self, step: SetTimeSlice) -> tuple[int, int]:
        return 1, 3

    def read(self, step: SetTimeSlice) -> int:
        if self.error is not None:
            raise self.error
        return self.now

    def write(self, step: SetTimeSlice, value: int) -> None:
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


def test_value_outside_the_bounds_is_refused_and_leaves_nothing(dimmer: Dimmer) -> None:
    with pytest.raises(ClaimRefusedError) as refused:
        dimmer.do(SetTimeSlice("GPU-1", 4), PLAN)
    text = "GPU GPU-1 accepts a time slice from 1 lm to 3 lm, but the claim asks for 4 lm; dim less"
    assert (str(refused.value), refused.value.has_no_effect) == (text, True)
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
    dimmer.error = None
    dimmer.restore("GPU-1")
    assert (dimmer.now, dimmer.gpus()) == (3, set())
    assert [line["event"] for line in logs] == ["lost", "set_again"]
