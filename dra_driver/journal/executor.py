"""Runs the steps of a plan and undoes them, in the same way for a failed Prepare and for Unprepare.

Steps that change a GPU run in its lane, in parallel for different GPUs; each is entered in the GPU's ledger
first. Steps that only write files come last. To undo a plan, the executor removes its files at once, and the
cleaner undoes the rest, because the ledger may list more steps than the record.

A Prepare calls `intend` with the claim's lock and the planning lock, `change` without a lock, and `complete`
with the claim's lock. The end of a claim calls `remove` with the claim's lock, and `undo_rest` without a
lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import structlog

from dra_driver.base.deadline import time_left
from dra_driver.errors import DraDriverError, NvmlTransientError, RetryableError
from dra_driver.journal.cleaner import Cleaner, StepRunner
from dra_driver.journal.lanes import Lanes, Operation
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import LedgerEntry, by_gpus
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import (
    FileStep,
    KeptStep,
    StartMaintenance,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
    maintenance_of,
)

_log = structlog.get_logger(__name__)

_TURN_S = 0.05
STEPS_S = 43.0
"""If the call has no deadline."""
_USUAL_S = 25.0
"""No tool takes longer for a step, so no claim waits for a lane whose operation is older."""
_CHECK_S = 1.0
_FINISH_S = 0.5
"""Reserved for writing files and for rolling back."""
_STEPS_OF_ANY_CLAIM: Sequence[Step] = (
    StartMaintenance((), "Wait", 0),
    WriteDeviceMetadata(()),
    WriteCdiSpec(),
)
"""What a claim without a readable record may have outside the ledgers."""
_UNDO_WAIT_S = 5.0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def changes_more_than_the_spec(plan: Plan) -> bool:
    """Whether a plan does not only write the claim's files, which need no durable record: a power cut removes
    them, or the next Prepare checks them.
    """
    return not all(isinstance(step, FileStep) for step in plan.steps)


@dataclass(eq=False)
class Executor:
    records: RecordStore
    cleaner: Cleaner
    runner: StepRunner[Step]
    lanes: Lanes
    boot_id: str
    now: Callable[[], str] = _now

    def __post_init__(self) -> None:
        self._turn = threading.Lock()

    def intend(self, plan: Plan, known: ClaimRecord | None) -> ClaimRecord:
        """Write the plan's record before its steps run. A `prepared` record of this boot with the same claim,
        devices and steps is not changed. Raises: StateError.
        """
        record = self._intended(plan, known)
        if record != known:
            lasts = changes_more_than_the_spec(plan)
            self.records.save(record, durable=lasts, whole=lasts)
        return record

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Let plans that only write files run one after the other, but none wait longer than `_TURN_S`. Each
        takes a millisecond of Python code; in parallel, all would finish as late as the last one.
        """
        is_ours = self._turn.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if is_ours:
                self._turn.release()

    def change(self, plan: Plan, record: ClaimRecord, wait_s: float = STEPS_S) -> None:
        """Run the steps on GPUs in the lanes. After a retry, steps that are done stay done.

        Raises: the error of a step (of several errors, the first that is not an NvmlTransientError);
        RetryableError if a step did not finish in the call's time (it continues in its lane);
        GpuUnresponsiveError.
        """
        if not changes_more_than_the_spec(plan):
            return
        groups = by_gpus(plan.steps)
        self.lanes.refuse_unresponsive(frozenset().union(*(gpus for gpus, _ in groups)))
        given_up = threading.Event()

        def do(steps: Sequence[Step], operation: Operation) -> None:
            operation.is_given_up = given_up.is_set
            for step in steps:
                if given_up.is_set():
                    return
                operation.what = step.doing
                self._do(step, plan, record)

        end = time.monotonic() + wait_s - _FINISH_S
        submitted = [self.lanes.submit(gpus, steps[0].doing, partial(do, steps)) for gpus, steps in groups]
        try:
            late = self._waited(groups, submitted, end)
        finally:
            given_up.set()
        errors = [error for one in submitted if one not in late and (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, Exception):
                raise error
        if late:
            self._raise_late([gpus for (gpus, _), one in zip(groups, submitted, strict=True) if one in late])
        if errors:
            raise min(errors, key=lambda error: isinstance(error, NvmlTransientError))

    def _waited(
        self,
        groups: Sequence[tuple[frozenset[str], Sequence[Step]]],
        submitted: Sequence[Future[None]],
        end: float,
    ) -> set[Future[None]]:
        """Return what has not finished at `end` (time.monotonic()).

        Raises: GpuUnresponsiveError if a group waits behind an operation that takes longer than usual.
        """
        while True:
            waiting = [
                gpus
                for (gpus, _), one in zip(groups, submitted, strict=True)
                if not (one.running() or one.done())
            ]
            self.lanes.refuse_unresponsive(frozenset[str]().union(*waiting), _USUAL_S)
            left = max(0.0, end - time.monotonic())
            late = wait(submitted, min(_CHECK_S, left) if waiting else left).not_done
            if not late or time.monotonic() >= end:
                return late

    def _do(self, step: Step, plan: Plan, record: ClaimRecord) -> None:
        """From the entry in the GPU's ledger on, the end of the claim undoes the step."""
        ledger = self.cleaner.ledger
        entry = LedgerEntry(record.ref, record.boot_id, step) if isinstance(step, KeptStep) else None
        before = None if entry is None else ledger.add(entry)
        try:
            self._refuse_changed(record)
            self.runner.do(step, plan)
        except DraDriverError as error:
            if entry is not None and error.has_no_effect and before != entry:
                # Restore the previous entry, which may be from an older boot.
                ledger.change([before] if before is not None else [], [entry] if before is None else [])
            raise

    def _raise_late(self, groups: Sequence[Collection[str]]) -> None:
        running = self.lanes.under_way()
        late = sorted(running.keys() & frozenset[str]().union(*groups))
        if not late:
            raise RetryableError("a step could not start before the kubelet's deadline; the kubelet retries")
        raise RetryableError(
            f"{running[late[0]].text(late[0])}; the kubelet's deadline has passed, and the kubelet retries"
        )

    def _refuse_changed(self, record: ClaimRecord) -> ClaimRecord:
        """Raise RetryableError if an Unprepare or a failed Prepare has changed the record. The call that
        wrote the new record submits its own steps.
        """
        known = self.records.get(record.ref.uid)
        if known is None or not record.names_the_same(known):
            changed = RetryableError("another call changed the claim; the kubelet retries")
            changed.has_no_effect = True
            raise changed
        return known

    def complete(self, plan: Plan, record: ClaimRecord) -> ClaimRecord:
        """Do the steps that write files, then mark the claim as prepared; return its record.

        Raises: the error of a step; StateError; RetryableError if another call has changed the record since
        `intend`, or if NVML is no longer closed for a maintenance claim.
        """
        known = self._refuse_changed(record)
        if record.maintenance is not None and not self.runner.in_place(record.maintenance, known):
            raise RetryableError(
                "NVML is not closed any more: another call or `detach --end` opened it before the claim was prepared; "
                "the kubelet retries"
            )
        lasts = changes_more_than_the_spec(plan)
        with nullcontext() if lasts else self._one_at_a_time():
            for step in plan.steps:
                if isinstance(step, FileStep):
                    self.runner.do(step, plan)
            if record.phase == "prepared":
                return record
            done = replace(record, phase="prepared", prepared_at=record.prepared_at or self.now())
            # A power cut may lose this write, but it also ends the boot and with it every step's result.
            self.records.save(done, durable=False, whole=lasts)
            return done

    def remove(self, ref: ClaimRef, record: ClaimRecord | None) -> None:
        """Remove the claim's files and record; without a readable `record`, everything that a claim may have.
        Raises: StateError; then the record stays.
        """
        steps = _STEPS_OF_ANY_CLAIM if record is None else record.steps
        maintenance = maintenance_of(steps)
        try:
            for step in reversed(steps):
                if isinstance(step, FileStep):
                    self.runner.undo(step, ref)
            with self.cleaner.removing(ref.uid):
                was_there = self.records.delete(ref.uid)
        except DraDriverError:
            # Let NVML open again in any case: the pod has ended, and NVML is closed for the whole node.
            if maintenance is not None:
                self.runner.undo(maintenance, ref)
            raise
        if maintenance is not None:
            # Undo this step last: a Prepare that is closing NVML now will then see that the record is gone.
            self.runner.undo(maintenance, ref)
        if record is None and was_there:
            _log.warning(
                "newer_record_removed",
                claim_uid=ref.uid,
                remedy="settings that the newer release made on GPUs may remain; check with `nvidia-smi`, or reboot "
                "the node",
            )

    def undo_rest(self, uid: str) -> None:
        """Undo the claim's other steps, but wait only briefly. Raises: StateError."""
        self.cleaner.undo_rest(uid, time_left(_UNDO_WAIT_S))

    def in_place(self, record: ClaimRecord) -> bool:
        """Whether every step was done in this boot and its result still exists."""
        is_prepared = record.as_of(self.boot_id).phase == "prepared"
        return is_prepared and all(self.runner.in_place(step, record) for step in record.steps)

    def _intended(self, plan: Plan, known: ClaimRecord | None) -> ClaimRecord:
        held = plan.held_devices()
        if known is None:
            return ClaimRecord(plan.claim, "preparing", self.boot_id, held, plan.steps)
        unchanged = (known.claim, known.devices, known.boot_id) == (plan.claim, held, self.boot_id)
        if known.phase == "prepared" and unchanged and known.steps == plan.steps:
            return known
        return replace(
            known,
            claim=plan.claim,
            phase="prepared" if known.phase == "prepared" and known.devices == held else "preparing",
            boot_id=self.boot_id,
            devices=held,
            steps=plan.steps,
        )


StepObserver = Callable[[str, Literal["do", "undo"], float, Exception | None], None]
"""A step's tag, its duration in seconds, and its error. Must not block or raise."""


@dataclass(eq=False)
class StepDispatcher:
    runners: Mapping[type[Step], StepRunner[Any]]
    observe: StepObserver = lambda *_: None
    clock: Callable[[], float] = time.monotonic

    def do(self, step: Step, plan: Plan) -> None:
        with self._timed(step, "do"):
            self.runners[type(step)].do(step, plan)

    def undo(self, step: Step, ref: ClaimRef) -> None:
        with self._timed(step, "undo"):
            self.runners[type(step)].undo(step, ref)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return self.runners[type(step)].in_place(step, record)

    @contextmanager
    def _timed(self, step: Step, action: Literal["do", "undo"]) -> Iterator[None]:
        began, failed = self.clock(), None
        try:
            yield
        except Exception as error:
            failed = error
            raise
        finally:
            self.observe(step.tag, action, self.clock() - began, failed)
