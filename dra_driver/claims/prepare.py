"""Prepares one claim: wait in line, plan, do the steps, answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import structlog

from dra_driver.claims.attempt_steps import AttemptSteps, refuse_unprepared
from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.planner import ClaimPlanner
from dra_driver.claims.rules.conflicts import DeviceHeldError
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting_line import WAITED_FOR, PrepareAttempt, WaitingLine
from dra_driver.errors import (
    DeviceLostError,
    DraDriverError,
    NvmlTransientError,
    NvmlUnavailableError,
)
from dra_driver.files.file_lock import LockBusyError
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.executor import OperationHangsError
from dra_driver.journal.gpu_locks import GpuLocks
from dra_driver.journal.lanes import GpuUnresponsiveError
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.claim import AllocatedClaim, Prepared
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_FINISH_S = 5.0
_LOOK_S = 1.0
_SURVIVED = (
    NvmlUnavailableError,  # the NVIDIA driver is being replaced
    DeviceLostError,  # the pod keeps the other devices of the claim too, whatever the GPU's taint does with the pod
    OperationHangsError,
    GpuUnresponsiveError,
    LockBusyError,
)
"""What keeps a claim from being looked after, but not the pod of a claim that is prepared from running."""


class Preparer:
    """Prepares claims. No lock is held while the API server or a lane is waited for."""

    def __init__(
        self,
        planner: ClaimPlanner,
        records: RecordStore,
        claim_locks: ClaimLocks,
        planning: GpuLocks,
        steps: AttemptSteps,
        line: WaitingLine,
        unpreparer: Unpreparer,
        refuse_changing: Callable[[Collection[str]], None],
    ) -> None:
        """`refuse_changing` raises NvmlTransientError while the node's MIG layout changes one of these GPUs."""
        self._planner = planner
        self._records = records
        self._claim_locks = claim_locks
        self._planning = planning
        self._steps = steps
        self._line = line
        self._unpreparer = unpreparer
        self._refuse_changing = refuse_changing

    def prepare(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        """The answer to the kubelet, and the claim's record; None if the claim has no device of this driver.

        Raises: why the claim cannot be prepared now; what this attempt has begun is taken back.
        """
        with self._line.trying(attempt):
            try:
                return self._prepare_until_free(attempt)
            except Exception:
                self._steps.give_up(attempt)  # while still in line for what this frees
                raise

    def _prepare_until_free(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        """Try. While the holders of the devices are about to let go, wait and try again."""
        has_looked = False
        while True:
            try:
                return self._prepare_once(attempt, attempt.claim)
            except WAITED_FOR as error:
                if not isinstance(error, NvmlTransientError):
                    self._steps.give_up(attempt)
                if not self._finished_one_of(error, attempt.call):
                    self._line.wait(attempt, error)
            except (NvmlUnavailableError, DeviceLostError):
                # Discovery may not have seen yet that the driver was loaded again or that the GPU is back.
                # A look takes a moment; the kubelet would call again only after a minute.
                if has_looked or not self._planner.is_usable():
                    raise
                has_looked = True
                self._planner.look_again(attempt.call)

    def _finished_one_of(self, error: DraDriverError, call: KubeletCall) -> bool:
        """Whether a holder is unprepared now whose Unprepare, called by the kubelet, could not be finished."""
        for conflict in error.conflicts if isinstance(error, DeviceHeldError) else ():
            ref = conflict.holder.ref
            since_ns = self._line.unfinished(ref.uid)
            if since_ns is None:
                continue
            try:
                if self._unpreparer.reclaim(ref, conflict.holder, since_ns, min(call.left(), _FINISH_S)):
                    return True
                self._line.note_unprepared(ref.uid)  # a newer Prepare wants the claim
            except DraDriverError as again:
                _log.info("unprepare_still_unfinished", claim_uid=ref.uid, reason=str(again))
        return False

    def _prepare_once(
        self, attempt: PrepareAttempt, claim: AllocatedClaim
    ) -> tuple[Prepared, ClaimRecord | None]:
        """Plan and write the record, do the steps, answer. A claim that was prepared before keeps what it has, whatever
        hangs or is lost: its pod may run."""
        try:
            plan, record = self._planned(attempt, claim)
            prepared = self._planner.answer(claim, plan)
            return prepared, None if record is None else self._steps.carry_out(attempt, plan, record)
        except _SURVIVED:
            with self._claim_locks.hold(attempt.ref.uid, _LOOK_S) as guard:
                refuse_unprepared(guard, attempt.call)
                known = self._records.get(attempt.ref.uid)
                if known is None or known.claim != claim or not self._steps.stands(known):
                    raise
                guard.note_prepared(attempt.call.began_ns)
                return self._planner.answer(claim, known), known

    def _planned(self, attempt: PrepareAttempt, claim: AllocatedClaim) -> tuple[Plan, ClaimRecord | None]:
        """The claim's plan, and the record that says what it is about to do; None for a claim without devices. What
        ended claims left on its GPUs is undone first."""
        tried: set[str] = set()
        while True:
            ended: list[PendingCleanup] = []
            try:
                plan, record, pending = self._planned_once(attempt, claim, tried, ended)
            finally:
                for one in ended:
                    self._steps.clean(one)
            if plan is None:
                continue
            if not pending:
                return plan, record
            tried.update(one.name for one in pending)
            self._steps.settle(pending, plan)
            attempt.call.left()

    def _planned_once(
        self,
        attempt: PrepareAttempt,
        claim: AllocatedClaim,
        tried: Collection[str],
        ended: list[PendingCleanup],
    ) -> tuple[Plan | None, ClaimRecord | None, Sequence[PendingCleanup]]:
        """Plan under the locks of the claim and of planning on its GPUs, and write the record, unless there is
        something to be undone first, which is returned. No plan where other GPUs than expected are needed. `ended` gets
        what is to be undone of an earlier allocation of the claim."""
        uid, call = attempt.ref.uid, attempt.call
        with self._claim_locks.hold(uid, call.left(), call.has_left) as guard:
            refuse_unprepared(guard, call)
            known = self._records.get(uid)
            if not claim.results and known is None:
                return Plan(claim, (), ()), None, ()
            gpus = self._planner.gpus_of(claim, call) | (known.locked_gpus if known else frozenset())
            self._planner.refuse_unready_imex(claim, known, call)
            with self._planning.hold(gpus, call.left(), call.has_left):
                self._refuse_changing(gpus)
                try:
                    plan = self._planner.plan(claim, known, self._line.ahead_of(attempt))
                except DeviceHeldError:
                    # Two claims that swap devices would wait for each other for ever.
                    allocated = frozenset(result.device for result in claim.results)
                    if known is not None and attempt.number is not None and not known.is_within(allocated):
                        ended += self._steps.leave(known)
                    raise
                if not plan.locked_gpus <= gpus:
                    return None, None, ()
                attempt.wanted = plan.held_devices()
                if known is not None and known.devices != attempt.wanted:
                    ended += self._steps.leave(known)
                    known = None
                if known is None or known.phase != "prepared":
                    pending = self._steps.pending_before(plan, tried)
                    if pending:
                        return plan, None, pending
                call.left()
                return plan, self._steps.begin(attempt, plan, known), ()
