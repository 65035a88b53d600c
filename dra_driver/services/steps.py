"""Which runner does a step: each kind of step has one, and knows its undo."""

from __future__ import annotations

from collections.abc import Mapping

from dra_driver.core.planning import Plan
from dra_driver.errors import StateError
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, UnknownStep
from dra_driver.services.executor import StepRunner


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
            raise StateError(
                f"the claim was prepared by a newer release of the driver, whose step {kind} this one cannot undo; "
                "install that release again to take the claim back"
            )
        return runner
