"""Runs the steps of a plan under a record, and takes them back. One way serves rollback after a failure, Unprepare and
recovery after a crash.

Steps that change a GPU wait for a tool, a daemon or the silicon. Those of different GPUs run side by side, those of one
GPU one after the other. Then come the steps that only write files. They are taken back the other way round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal, Protocol

import structlog

from dra_driver.concurrency.deadline import at_most, time_left
from dra_driver.concurrency.side_by_side import side_by_side
from dra_driver.errors import DraDriverError, NvmlTransientError, PermanentError, RetryableError, StateError
from dra_driver.journal.debts import UNDO_S, Debts, tell_crash
from dra_driver.journal.gpu_locks import HeldGpus
from dra_driver.journal.records import RecordStore
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import STEP_TEXTS, RunMps, Step, WriteCdiSpec, WriteDeviceMetadata

_log = structlog.get_logger(__name__)

_TURN_S = 0.05
_GPUS_AT_ONCE = 16
_STEPS_S = 43.0
"""How long the steps on GPUs may take where the call has no deadline."""
_TAKE_BACK_S = 12.0
"""How long all undos of a claim may take whose failure does not keep it from ending."""


HoldGpus = Callable[[frozenset[str]], AbstractContextManager[HeldGpus]]


class StepRunner(Protocol):
    """Does and undoes steps of one type. Both converge: many calls have the same result as one."""

    def do(self, step: Step, plan: Plan) -> None:
        """Do what the step describes, whatever part of it is done already."""

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Take back what the step may have done; the record must be enough for that."""

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether what the step made is still there, as far as that shows without the GPU driver."""

    def forget(self, claim_uid: str) -> None:
        """Remove whatever has the claim's UID in its name, for a claim that has no record."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def tell_incomplete(claim_uid: str, error: DraDriverError) -> None:
    """Log why a half-prepared claim could not be taken back."""
    _log.error(
        "rollback_incomplete",
        claim_uid=claim_uid,
        reason=str(error),
        remedy="the record is kept; the next Prepare or Unprepare of the claim goes on with it",
    )


def changes_more_than_the_spec(plan: Plan) -> bool:
    """Whether a plan has a step whose effect survives a power cut.

    A CDI spec or metadata file does not count: a power cut removes it, or the next Prepare checks it.
    """
    return not all(map(_writes_files, plan.steps))


def _writes_files(step: Step) -> bool:
    return isinstance(step, WriteCdiSpec | WriteDeviceMetadata)


def _gpus_of(step: Step) -> frozenset[str]:
    if isinstance(step, RunMps):
        return frozenset(step.spec.gpu_uuids)
    uuid = getattr(step, "gpu_uuid", "")
    return frozenset({uuid} if uuid else ())


def _keep_hanging(
    lanes: Sequence[tuple[frozenset[str], Sequence[Step]]],
    futures: Sequence[Future[None]],
    begun: Collection[Step],
    held: HeldGpus,
    prefix: str,
) -> list[str]:
    """Keep the locks of the GPUs on which a step does not end; what hangs, for people."""
    texts = []
    for (gpus, steps), future in zip(lanes, futures, strict=True):
        if not future.done():
            step = next((step for step in reversed(steps) if step in begun), steps[0])
            text = f"{prefix}{STEP_TEXTS[type(step)]}"
            held.keep(gpus, future, text)
            texts.append(f"{text} on {' and '.join(f'GPU {uuid}' for uuid in sorted(gpus))}")
    return texts


def _lanes(steps: Sequence[Step]) -> list[tuple[frozenset[str], list[Step]]]:
    """The steps that change GPUs, in their order, by the GPUs that they change. Steps of different lanes may run side
    by side, because no GPU is in two; an MPS daemon of several GPUs joins theirs."""
    changing = [(_gpus_of(step), step) for step in steps if not _writes_files(step)]
    lanes: list[frozenset[str]] = []
    for gpus, _ in changing:
        joined = [lane for lane in lanes if lane & gpus or lane == gpus]
        lanes = [lane for lane in lanes if lane not in joined] + [gpus.union(*joined)]
    return [(lane, [step for gpus, step in changing if gpus & lane or gpus == lane]) for lane in lanes]


class OperationHangsError(RetryableError):
    """A step on a GPU does not end. Its thread has the GPU's lock until it ends, and does nothing after that step."""


class Executor:
    """Carries plans out. The caller holds the locks of every GPU that the plan or the record touches, or tells how to
    get them.

    A crash before the record is written leaves nothing. A crash between that and the end of the steps, also between two
    tries, leaves a record in `preparing` that names every step. A crash after the last step, but before the record says
    `prepared`, leaves the same, and the next Prepare finds every step done.
    """

    def __init__(
        self,
        records: RecordStore,
        debts: Debts,
        runner: StepRunner,
        boot_id: str,
        now: Callable[[], str] = _now,
        must_last: Callable[[Plan], bool] = changes_more_than_the_spec,
        turn_s: float = _TURN_S,
    ) -> None:
        """`must_last` says whether the record of a plan has to survive a power cut. The other plans are carried out one
        at a time, but none waits longer than `turn_s` seconds."""
        self._records = records
        self._debts = debts
        self._runner = runner
        self._boot_id = boot_id
        self._now = now
        self._must_last = must_last
        self._turn_s = turn_s
        self._turn = threading.Lock()

    def carry_out(
        self, plan: Plan, known: ClaimRecord | None, held: HeldGpus, *, tries_again: bool = False
    ) -> ClaimRecord:
        """Write the record, then run every step; returns the record at the end. `held` are the locks of the GPUs.

        If a step fails, the steps are rolled back, except for a claim that was prepared before: its pod may be running.
        A step that this call did not begin, or that failed before it reached its tool, has nothing to be undone.
        A caller that `tries_again` after a NvmlTransientError finds the finished steps done; if it gives up, it must
        call `roll_back`. A step that does not end in the call's time keeps the lock of its GPU, and the record stays in
        `preparing`: the next Prepare goes on with it, or an Unprepare takes it back. Raises: what the step raised;
        OperationHangsError.
        """
        record = self._intended(plan, known)
        lasts = self._must_last(plan)
        with nullcontext() if lasts else self._in_turn():
            if record != known:
                self._records.save(record, durable=lasts, whole=lasts)
            begun: list[Step] = []
            try:
                self._do(plan, begun, held)
            except OperationHangsError:
                raise
            except Exception as error:
                stays = tries_again and isinstance(error, NvmlTransientError)
                if not stays and known is None:
                    begun_steps = tuple(step for step in plan.steps if step in begun)
                    self.roll_back(replace(record, steps=begun_steps), held)
                elif not stays and known is not None and known.phase != "prepared":
                    self.roll_back(record, held)
                raise
            if record.phase == "prepared":
                return record
            done = replace(record, phase="prepared", prepared_at=record.prepared_at or self._now())
            # A power cut may lose it, but it also ends the boot and removes everything that the steps made.
            self._records.save(done, durable=False, whole=lasts)
            return done

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Within it no other plan that only writes files is carried out, unless that takes longer than `turn_s`
        seconds. Such a plan takes a millisecond of this interpreter: side by side all plans end as late as the last
        one; one after the other, most end earlier."""
        is_ours = self._turn.acquire(timeout=self._turn_s)
        try:
            yield
        finally:
            if is_ours:
                self._turn.release()

    def _do(self, plan: Plan, begun: list[Step], held: HeldGpus) -> None:
        """Do every step; `begun` gets those that may have had an effect. Raises: what a step raised, and of several
        errors one that does not pass by itself; OperationHangsError."""
        given_up = threading.Event()

        def do(steps: Sequence[Step]) -> None:
            for step in steps:
                if given_up.is_set():
                    return
                begun.append(step)
                try:
                    self._runner.do(step, plan)
                except DraDriverError as error:
                    if error.has_no_effect:
                        begun.remove(step)
                    raise

        lanes = _lanes(plan.steps)
        tasks = [partial(do, steps) for _, steps in lanes]
        futures = side_by_side(tasks, _GPUS_AT_ONCE, time_left(_STEPS_S)) if lanes else []
        if lanes and all(future.cancelled() for future in futures):  # no thread could start
            for _, steps in lanes:
                do(steps)
            futures = []
            lanes = []
        given_up.set()
        hanging = _keep_hanging(lanes, futures, begun, held, "")
        if hanging:
            raise OperationHangsError(
                f"{hanging[0]} has not ended in the time of this call; it goes on, and the kubelet tries again"
            )
        if any(future.cancelled() for future in futures):
            raise RetryableError("a step could not begin in the time of this call; the kubelet tries again")
        errors = [error for done in futures if (error := done.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, NvmlTransientError))
        given_up.clear()
        do([step for step in plan.steps if _writes_files(step)])

    def take_back(self, record: ClaimRecord, hold: HoldGpus | HeldGpus) -> None:
        """End the claim of a record: undo every step, last first.

        The undos of steps that write files have to succeed. Then the record becomes a debt, and is one no more when
        everything else is undone; what cannot be undone in a few seconds stays owed. `hold` gives the locks of GPUs, or
        is those that the caller holds. Raises: StateError; then the record stays.
        """
        for step in reversed(record.steps):
            if _writes_files(step):
                self._runner.undo(step, record)
        if all(map(_writes_files, record.steps)):
            self._records.delete(record.ref.uid)
            return
        debt = self._debts.begin(record)
        try:
            left, cause = self._undo_on_gpus(record, hold)
        finally:
            self._debts.let_go(debt.name)
        if left:
            self._debts.keep(debt, left, cause)
        else:
            self._debts.end(debt)

    def _undo_on_gpus(self, record: ClaimRecord, hold: HoldGpus | HeldGpus) -> tuple[list[Step], str]:
        """The steps that could not be undone, and why."""
        given_up = threading.Event()
        undone: list[Step] = []

        def undo(gpus: frozenset[str], steps: Sequence[Step]) -> None:
            errors: list[Exception] = []
            with nullcontext() if isinstance(hold, HeldGpus) or not gpus else hold(gpus):
                for step in reversed(steps):
                    if given_up.is_set():  # it is the keeper's business by now
                        return
                    try:
                        with at_most(UNDO_S):
                            self._runner.undo(step, record)
                        undone.append(step)
                    except Exception as error:  # noqa: BLE001  a bug in one undo must not keep the claim from ending
                        tell_crash(error, record)
                        errors.append(error)
            if errors:
                raise errors[0]

        lanes = _lanes(record.steps)
        tasks = [partial(undo, gpus, steps) for gpus, steps in lanes]
        futures = side_by_side(tasks, _GPUS_AT_ONCE, time_left(_TAKE_BACK_S))
        given_up.set()
        if isinstance(hold, HeldGpus):
            _keep_hanging(lanes, futures, record.steps, hold, "the undo of ")
        causes: list[str] = []
        for future in futures:
            if future.cancelled() or not future.done():
                causes.append("it did not end in time")
            elif (error := future.exception()) is not None:
                if not isinstance(error, Exception):
                    raise error
                causes.append(str(error))
        left = [step for _, steps in lanes for step in steps if step not in undone]
        return left, "; ".join(dict.fromkeys(causes))

    def roll_back(self, record: ClaimRecord, held: HeldGpus) -> None:
        """Undo what a failed Prepare has done, as far as that is possible now. `held` are the locks of its GPUs."""
        try:
            self.take_back(record, held)
        except DraDriverError as error:
            tell_incomplete(record.ref.uid, error)

    def forget(self, claim_uid: str) -> None:
        """Remove whatever a claim without a record may have left. Raises: StateError.

        If an MPS daemon cannot be stopped, the claim's CDI spec stays, because nothing else tells of the daemon.
        """
        try:
            self._runner.forget(claim_uid)
        except (RetryableError, PermanentError) as error:
            if isinstance(error, StateError):
                raise
            _log.error("claim_not_forgotten", claim_uid=claim_uid, reason=str(error))

    def in_place(self, record: ClaimRecord) -> bool:
        """Whether every step of the record was done in this boot and its result is still there."""
        return (
            record.phase == "prepared"
            and record.boot_id == self._boot_id
            and all(self._runner.in_place(step, record) for step in record.steps)
        )

    def _intended(self, plan: Plan, known: ClaimRecord | None) -> ClaimRecord:
        """Write the record before the steps run. A record that says `prepared` in this boot stays as it is."""
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


class StepObserver(Protocol):
    """Hears of each step that was done or undone, or that failed. Must not block or raise."""

    def step_ended(
        self, step: type[Step], action: Literal["do", "undo"], duration_s: float, error: Exception | None
    ) -> None:
        """`error` is what the step raised, None if it succeeded."""


class StepDispatcher:
    """Hands each step to the runner of its type, and times it for the `observer` if there is one."""

    def __init__(
        self,
        runners: Mapping[type, StepRunner],
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runners = runners
        self._observer = observer
        self._clock = clock

    def observed(self, observer: StepObserver) -> StepDispatcher:
        """The same runners, timed for an observer."""
        return StepDispatcher(self._runners, observer)

    def do(self, step: Step, plan: Plan) -> None:
        """As the step's runner."""
        with self._timed(step, "do"):
            self._runners[type(step)].do(step, plan)

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """As the step's runner."""
        with self._timed(step, "undo"):
            self._runners[type(step)].undo(step, record)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """As the step's runner."""
        return self._runners[type(step)].in_place(step, record)

    def forget(self, claim_uid: str) -> None:
        """Every runner removes whatever has the claim's UID in its name."""
        for runner in self._runners.values():
            runner.forget(claim_uid)

    @contextmanager
    def _timed(self, step: Step, action: Literal["do", "undo"]) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        except Exception as error:
            self._tell(step, action, began, error)
            raise
        self._tell(step, action, began, None)

    def _tell(self, step: Step, action: Literal["do", "undo"], began: float, error: Exception | None) -> None:
        if self._observer is not None:
            self._observer.step_ended(type(step), action, self._clock() - began, error)
