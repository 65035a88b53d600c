"""Running the steps of a plan under a record, and taking them back. One loop serves rollback of a failure,
Unprepare and recovery after a crash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import structlog

from dra_driver.core.planning import Plan
from dra_driver.errors import DraDriverError, PassingRefusalError, StateError
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, UnknownStep, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.model.usage import UnknownUsage

_log = structlog.get_logger(__name__)

_TURN_S = 0.05
_DEVICE_KINDS = frozenset({"gpu", "mig"})


class StepRunner(Protocol):
    """Does and undoes single steps. Both converge: any number of calls leaves what one call leaves."""

    def do(self, step: Step, plan: Plan) -> None:
        """Bring about what the step describes, whatever part of it is there already."""

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Take back what the step may have done, from the record alone."""

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether what the step made is still there, as far as can be told without the GPU driver."""

    def forget(self, claim_uid: str) -> None:
        """Remove what bears the claim's name although no record speaks of it."""


class Records(Protocol):
    """Where records are kept."""

    def save(self, record: ClaimRecord, *, durable: bool = True, whole: bool = True) -> None:
        """Write, and have it survive a power cut if `durable`; if only `whole`, this version or the one before."""

    def delete(self, uid: str) -> None:
        """Remove, if there."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def unknown_step(kind: str) -> StateError:
    """The error for a step that this release does not know."""
    return StateError(
        f"the claim was prepared by a newer release of the driver, whose step {kind} this one cannot undo; "
        "install that release again to take the claim back"
    )


def refuse_newer(record: ClaimRecord) -> None:
    """Raises: StateError if only a newer release knows a step, a device or how it is used. To prepare the claim anew
    would lose that, and take away what its pod may be using."""
    kinds = [step.kind for step in record.steps if isinstance(step, UnknownStep)]
    kinds += [held.usage.kind for held in record.devices if isinstance(held.usage, UnknownUsage)]
    kinds += [held.kind for held in record.devices if held.kind not in _DEVICE_KINDS]
    if kinds:
        raise StateError(
            f"the claim was prepared by a newer release of the driver, whose {', '.join(dict.fromkeys(kinds))} "
            "this one does not know; install that release again"
        )


def tell_incomplete(claim_uid: str, error: DraDriverError) -> None:
    """Log what kept a claim that could not be prepared from being taken back."""
    _log.error(
        "rollback_incomplete",
        claim_uid=claim_uid,
        reason=str(error),
        remedy="the record is kept; the next Prepare or Unprepare of the claim goes on with it",
    )


def changes_more_than_the_spec(plan: Plan) -> bool:
    """Whether a plan does anything that a power cut does not undo by itself.

    A CDI spec or metadata file goes with the power, or is looked at by the next Prepare.
    """
    return any(not isinstance(step, WriteCdiSpec | WriteDeviceMetadata) for step in plan.steps)


class Executor:
    """Carries plans out. The caller holds the locks of every GPU that the plan or the record touches.

    Crash points, and what is there after each: before the record is written, nothing; between the record and
    the end of the steps, also between two tries, a record in `preparing` that names every step; after the last
    step but before the record says `prepared`, the same, and the next Prepare finds every step done.
    """

    def __init__(
        self,
        records: Records,
        runner: StepRunner,
        boot_id: str,
        now: Callable[[], str] = _now,
        must_last: Callable[[Plan], bool] = changes_more_than_the_spec,
        turn_s: float = _TURN_S,
    ) -> None:
        """`must_last` says whether the record of a plan has to survive a power cut; those that need not take turns,
        but wait no longer than `turn_s`."""
        self._records = records
        self._runner = runner
        self._boot_id = boot_id
        self._now = now
        self._must_last = must_last
        self._turn_s = turn_s
        self._turn = threading.Lock()

    def carry_out(self, plan: Plan, known: ClaimRecord | None, *, tries_again: bool = False) -> ClaimRecord:
        """Run every step, recorded first; returns the record as it stands in the end.

        A claim that was prepared before keeps what it has when a step fails now: its pod may be running. A caller that
        `tries_again` after a PassingRefusalError finds what was done until then; it calls `roll_back` if it gives up.
        Raises: what the step raised.
        """
        if known is not None:
            refuse_newer(known)
        record = self._intended(plan, known)
        lasts = self._must_last(plan)
        with nullcontext() if lasts else self._in_turn():
            if record != known:
                self._records.save(record, durable=lasts, whole=lasts)
            try:
                for step in plan.steps:
                    self._runner.do(step, plan)
            except Exception as error:
                stays = tries_again and isinstance(error, PassingRefusalError)
                if not stays and (known is None or known.phase != "prepared"):
                    self.roll_back(record)
                raise
            if record.phase == "prepared":
                return record
            done = replace(record, phase="prepared", prepared_at=record.prepared_at or self._now())
            # May be lost: a power cut ends the boot, and with it everything that the steps made.
            self._records.save(done, durable=False, whole=lasts)
            return done

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Plans that only write files are a millisecond's work in one interpreter: one after the other, each is done
        sooner than if all took turns within it. Nobody waits for one that hangs."""
        is_ours = self._turn.acquire(timeout=self._turn_s)
        try:
            yield
        finally:
            if is_ours:
                self._turn.release()

    def take_back(self, record: ClaimRecord) -> None:
        """Undo every step, last first, then forget the claim. Raises: what an undo raised; the record stays. StateError
        before anything is undone if there is a step that this release does not know."""
        for step in record.steps:
            if isinstance(step, UnknownStep):
                raise unknown_step(step.kind)
        for step in reversed(record.steps):
            self._runner.undo(step, record)
        self._records.delete(record.ref.uid)

    def roll_back(self, record: ClaimRecord) -> None:
        """Undo what a Prepare did in vain, as far as that can be done now."""
        try:
            self.take_back(record)
        except DraDriverError as error:
            tell_incomplete(record.ref.uid, error)

    def forget(self, claim_uid: str) -> None:
        """Clear away what a claim without a record may have left. Raises: StateError."""
        self._runner.forget(claim_uid)

    def in_place(self, record: ClaimRecord) -> bool:
        """Whether everything that the record says was done in this boot and is still there."""
        return (
            record.phase == "prepared"
            and record.boot_id == self._boot_id
            and all(self._runner.in_place(step, record) for step in record.steps)
        )

    def _intended(self, plan: Plan, known: ClaimRecord | None) -> ClaimRecord:
        """The record before the steps run. One that is prepared in this boot already stays as it is."""
        held = plan.held_devices()
        if known is None:
            return ClaimRecord(plan.claim, "preparing", self._boot_id, held, plan.steps)
        unchanged = (known.claim, known.devices, known.boot_id) == (plan.claim, held, self._boot_id)
        if known.phase == "prepared" and unchanged and known.steps == plan.steps:
            return known
        return replace(
            known,
            claim=plan.claim,
            phase="prepared" if known.phase == "prepared" and known.devices == held else "preparing",
            boot_id=self._boot_id,
            devices=held,
            steps=plan.steps,
        )
