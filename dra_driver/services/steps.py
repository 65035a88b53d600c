"""Which runner does a step: each kind of step has one, and knows its undo. And watching how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

from dra_driver.core.planning import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, UnknownStep
from dra_driver.services.executor import StepRunner, unknown_step


class StepDispatcher:
    """Hands each step to the runner of its type."""

    def __init__(self, runners: Mapping[type, StepRunner]) -> None:
        self._runners = runners

    def do(self, step: Step, plan: Plan) -> None:
        """As the step's runner. Raises: StateError for a step that this release does not know."""
        self._runner(step).do(step, plan)

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """As the step's runner. Raises: StateError for a step that this release does not know."""
        self._runner(step).undo(step, record)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """As the step's runner; what is not known cannot be told to be there."""
        return not isinstance(step, UnknownStep) and self._runner(step).in_place(step, record)

    def forget(self, claim_uid: str) -> None:
        """Every runner clears away what bears the claim's name."""
        for runner in self._runners.values():
            runner.forget(claim_uid)

    def _runner(self, step: Step) -> StepRunner:
        runner = self._runners.get(type(step))
        if runner is None:
            kind = step.kind if isinstance(step, UnknownStep) else type(step).__name__
            raise unknown_step(kind)
        return runner


class StepObserver(Protocol):
    """Hears of each step that was done or undone, or could not be. Must not block or raise."""

    def step_ended(
        self, step: type[Step], action: Literal["do", "undo"], duration_s: float, error: Exception | None
    ) -> None:
        """`error` is what the step raised."""


class ObservedSteps:
    """A runner whose steps are timed."""

    def __init__(
        self, runner: StepRunner, observer: StepObserver, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._observer = observer
        self._clock = clock

    def do(self, step: Step, plan: Plan) -> None:
        """As the runner."""
        with self._observed(step, "do"):
            self._runner.do(step, plan)

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """As the runner."""
        with self._observed(step, "undo"):
            self._runner.undo(step, record)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """As the runner."""
        return self._runner.in_place(step, record)

    def forget(self, claim_uid: str) -> None:
        """As the runner."""
        self._runner.forget(claim_uid)

    @contextmanager
    def _observed(self, step: Step, action: Literal["do", "undo"]) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        except Exception as error:
            self._observer.step_ended(type(step), action, self._clock() - began, error)
            raise
        self._observer.step_ended(type(step), action, self._clock() - began, None)
