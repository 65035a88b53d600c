"""Carries out the steps of a plan under a record, and takes them back. One way serves a failed Prepare and Unprepare.

Steps that change a GPU run in its lane (`lanes`), those of different GPUs side by side; each is in the GPU's ledger
before it is done. Then come the steps that only write files. They are taken back the other way round: files at once,
the rest by the cleaner, since the ledger has more than the records name.

| Who | Holds | And does |
|---|---|---|
| Prepare | the locks of the claim and, for files only, of planning on its GPUs | `intend` writes the record |
| Prepare | nothing | `change` has the lanes do the steps, and waits for them |
| Prepare | the claim's lock | `finish` writes files, and `prepared` into the record, if that is still its own |
| Unprepare, or a Prepare that fails | the claim's lock | `leave` removes the files and the record |
| the same | nothing | `clean` has the lanes undo the rest, and waits for a moment |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol

import structlog

from dra_driver.base.deadline import time_left
from dra_driver.errors import DraDriverError, NvmlTransientError, RetryableError
from dra_driver.journal.cleaner import Cleaner, StepRunner
from dra_driver.journal.lanes import Lanes, Operation
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import LedgerEntry, by_gpus, is_undone_in_lane
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.plan import Plan
from dra_driver.model.record import (
    STEP_TEXTS,
    ClaimRecord,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
    writes_files,
)

_log = structlog.get_logger(__name__)

_TURN_S = 0.05
STEPS_S = 43.0
"""How long the steps on GPUs may take where the call has no deadline."""
_USUAL_S = 25.0
"""Longer than every tool may take for a step. Behind an operation that is older, no claim waits for a lane."""
_LOOK_S = 1.0
_FINISH_S = 0.5
"""What is left of the call's time for the files, and for taking back."""
_TAKE_BACK_S = 5.0
"""How long whoever ends a claim waits for undos, whose failure does not keep it from ending."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def changes_more_than_the_spec(plan: Plan) -> bool:
    """Whether a plan has a step whose effect survives a power cut.

    A CDI spec or metadata file does not count: a power cut removes it, or the next Prepare checks it.
    """
    return not all(map(writes_files, plan.steps))


@dataclass(eq=False)
class Executor:
    """Carries plans out and takes them back.

    A crash before the record is written leaves nothing. A crash between that and the end of the steps, also between two
    tries, leaves a record in `preparing` that names every step. A crash after the last step, but before the record says
    `prepared`, leaves the same, and the next Prepare finds every step done.

    The record of a plan that changes more than the spec has to survive a power cut. The files of other plans are
    written one claim at a time, but none waits longer than `_TURN_S` seconds.
    """

    records: RecordStore
    cleaner: Cleaner
    runner: StepRunner[Step]
    lanes: Lanes
    boot_id: str
    now: Callable[[], str] = _now

    def __post_init__(self) -> None:
        self._turn = threading.Lock()

    def intend(self, plan: Plan, known: ClaimRecord | None) -> ClaimRecord:
        """Write the record that says what the plan is about to do; `known` is the one before. One that says `prepared`
        in this boot stays as it is. Raises: StateError."""
        record = self._intended(plan, known)
        if record != known:
            lasts = changes_more_than_the_spec(plan)
            self.records.save(record, durable=lasts, whole=lasts)
        return record

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Within it no other plan that only writes files is carried out, unless that takes longer than `_TURN_S`
        seconds. Such a plan takes a millisecond of this interpreter: side by side all plans end as late as the last
        one; one after the other, most end earlier."""
        is_ours = self._turn.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if is_ours:
                self._turn.release()

    def change(self, plan: Plan, record: ClaimRecord, wait_s: float = STEPS_S) -> None:
        """Have the lanes do the steps on GPUs, under the record that `intend` wrote. The caller holds no lock. What was
        done is done when it is tried again. Raises: what a step raised, and of several errors one that does not pass
        by itself; RetryableError where one has not ended in the call's time, and goes on in its lane;
        GpuUnresponsiveError."""
        if all(map(writes_files, plan.steps)):
            return
        groups = by_gpus(plan.steps)
        self.lanes.refuse_unresponsive(frozenset().union(*(gpus for gpus, _ in groups)))
        given_up = threading.Event()

        def do(steps: Sequence[Step], operation: Operation) -> None:
            for step in steps:
                if given_up.is_set():
                    return
                operation.turn_to(STEP_TEXTS[type(step)])
                self._do(step, plan, record)

        end = time.monotonic() + wait_s - _FINISH_S
        asked = [
            self.lanes.ask(gpus, STEP_TEXTS[type(steps[0])], partial(do, steps)) for gpus, steps in groups
        ]
        try:
            late = self._waited(groups, asked, end)
        finally:
            given_up.set()
        errors = [error for one in asked if one not in late and (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, Exception):
                raise error
        if late:
            self._tell_late([gpus for (gpus, _), one in zip(groups, asked, strict=True) if one in late])
        if errors:
            raise min(errors, key=lambda error: isinstance(error, NvmlTransientError))

    def _waited(
        self,
        groups: Sequence[tuple[frozenset[str], Sequence[Step]]],
        asked: Sequence[Future[None]],
        end: float,
    ) -> set[Future[None]]:
        """Wait until what was asked has ended, or until `end` (time.monotonic()); what has not ended. Raises:
        GpuUnresponsiveError where one waits for its lane behind an operation that takes longer than usual."""
        while True:
            waiting = [
                gpus
                for (gpus, _), one in zip(groups, asked, strict=True)
                if not (one.running() or one.done())
            ]
            self.lanes.refuse_unresponsive(frozenset[str]().union(*waiting), _USUAL_S)
            left = max(0.0, end - time.monotonic())
            late = wait(asked, min(_LOOK_S, left) if waiting else left).not_done
            if not late or time.monotonic() >= end:
                return late

    def _do(self, step: Step, plan: Plan, record: ClaimRecord) -> None:
        """Do a step on a GPU, after it is in the ledger. Whoever ends the claim from then on undoes it."""
        entry = LedgerEntry(record.ref, record.boot_id, step)
        ledger = self.cleaner.ledger
        is_kept = is_undone_in_lane(step)
        before = ledger.add(entry) if is_kept else None
        try:
            self._refuse_changed(record)
            self.runner.do(step, plan)
        except DraDriverError as error:
            if is_kept and error.has_no_effect and before != entry:
                # The entry before may be that of an older boot.
                ledger.change([before] if before is not None else [], [entry] if before is None else [])
            raise

    def _tell_late(self, groups: Sequence[Collection[str]]) -> None:
        uses = self.lanes.uses()
        late = sorted(uses.keys() & frozenset[str]().union(*groups))
        if not late:
            raise RetryableError("a step could not begin in the time of this call; the kubelet tries again")
        raise RetryableError(f"{uses[late[0]].text} in the time of this call; the kubelet tries again")

    def _refuse_changed(self, record: ClaimRecord) -> None:
        """Raises: RetryableError if the claim's record does not ask for the same any more: an Unprepare has come
        meanwhile, or another Prepare that failed. Whoever wrote a new one asks the lanes again."""
        if not record.names_the_same(self.records.get(record.ref.uid)):
            changed = RetryableError("another call has changed the claim meanwhile; the kubelet calls again")
            changed.has_no_effect = True
            raise changed

    def finish(self, plan: Plan, record: ClaimRecord) -> ClaimRecord:
        """Do the steps that write files, then write that the claim is prepared; returns its record. The caller holds
        the claim's lock. Raises: what a step raised; StateError; RetryableError if another call has changed the record
        since `intend`."""
        self._refuse_changed(record)
        lasts = changes_more_than_the_spec(plan)
        with nullcontext() if lasts else self._in_turn():
            for step in plan.steps:
                if writes_files(step):
                    self.runner.do(step, plan)
            if record.phase == "prepared":
                return record
            done = replace(record, phase="prepared", prepared_at=record.prepared_at or self.now())
            # A power cut may lose it, but it also ends the boot and removes everything that the steps made.
            self.records.save(done, durable=False, whole=lasts)
            return done

    def leave(self, record: ClaimRecord) -> None:
        """End the claim of a record, as far as that needs files: undo its steps that write files, and remove the
        record. The caller holds the claim's lock, and calls `clean` without it. Raises: StateError; then the record
        stays."""
        for step in reversed(record.steps):
            if writes_files(step):
                self.runner.undo(step, record)
        with self.cleaner.ending(record.ref.uid):
            self.records.delete(record.ref.uid)

    def clean(self, uid: str) -> None:
        """Have the lanes undo what the claim has set on GPUs, and wait for that a moment. The caller holds no lock.
        Raises: StateError."""
        self.cleaner.finish(uid, time_left(_TAKE_BACK_S))

    def lost(self, claim_uid: str) -> ClaimRecord:
        """A record, for `leave`, of a claim that has none or none that this release can read. Raises: StateError."""
        if self.records.delete(claim_uid):
            _log.warning(
                "newer_record_removed",
                claim_uid=claim_uid,
                remedy="what the newer release set on GPUs may be left; see `nvidia-smi`, or reboot the node",
            )
        claim = AllocatedClaim(ClaimRef("?", "?", claim_uid), (), ())
        return ClaimRecord(claim, "preparing", self.boot_id, (), (WriteDeviceMetadata(()), WriteCdiSpec()))

    def in_place(self, record: ClaimRecord) -> bool:
        """Whether every step of the record was done in this boot and its result is still there."""
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


class StepObserver(Protocol):
    """Hears of each step that was done or undone, or that failed. Must not block or raise."""

    def step_ended(
        self, step: type[Step], action: Literal["do", "undo"], duration_s: float, error: Exception | None
    ) -> None:
        """`error` is what the step raised, None if it succeeded."""


@dataclass(eq=False)
class StepDispatcher:
    """Hands each step to the runner of its type, and times it for the `observer` if there is one."""

    runners: Mapping[type, StepRunner[Any]]
    observer: StepObserver | None = None
    clock: Callable[[], float] = time.monotonic

    def do(self, step: Step, plan: Plan) -> None:
        """As the step's runner."""
        with self._timed(step, "do"):
            self.runners[type(step)].do(step, plan)

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """As the step's runner. Raises: RetryableError if there is none, such as in a command."""
        with self._timed(step, "undo"):
            runner = self.runners.get(type(step))
            if runner is None:
                raise RetryableError("only gpu-dra-driver itself can do that; have it run on the node")
            runner.undo(step, record)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """As the step's runner."""
        return self.runners[type(step)].in_place(step, record)

    @contextmanager
    def _timed(self, step: Step, action: Literal["do", "undo"]) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        except Exception as error:
            self._tell(step, action, began, error)
            raise
        self._tell(step, action, began, None)

    def _tell(self, step: Step, action: Literal["do", "undo"], began: float, error: Exception | None) -> None:
        if self.observer is not None:
            self.observer.step_ended(type(step), action, self.clock() - began, error)
