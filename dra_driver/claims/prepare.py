"""Prepares one claim: wait in line, lock, plan, do the steps, answer."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TypeGuard

import structlog

from dra_driver.claims.attempt_steps import AttemptSteps
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
    RetryableError,
)
from dra_driver.files.file_lock import LockBusyError
from dra_driver.journal.claim_locks import ClaimGuard, ClaimLocks
from dra_driver.journal.gpu_locks import GpuLocks, HeldGpus
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import AllocatedClaim, Prepared
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_FINISH_S = 5.0
_PREPARED_WAIT_S = 5.0


class Preparer:
    """Prepares claims. Attempts for different GPUs run at the same time; those for one GPU run one after the other.

    No lock is held while the API server is asked.
    """

    def __init__(
        self,
        planner: ClaimPlanner,
        records: RecordStore,
        claim_locks: ClaimLocks,
        gpu_locks: GpuLocks,
        steps: AttemptSteps,
        line: WaitingLine,
        unpreparer: Unpreparer,
    ) -> None:
        self._planner = planner
        self._records = records
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._steps = steps
        self._line = line
        self._unpreparer = unpreparer

    def prepare(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        """The answer to the kubelet, and the claim's record; None if the claim has no device of this driver.

        Raises: why the claim cannot be prepared now; what this attempt has begun is taken back.
        """
        with self._line.trying(attempt):
            try:
                return self._prepare_until_free(attempt)
            finally:
                self._steps.give_up(attempt)  # while still in line for what this frees

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
        """Lock, plan, do the steps, answer."""
        uid, call = attempt.ref.uid, attempt.call
        with self._claim_locks.hold(uid, call.left(), call.has_left) as guard:
            while True:
                _refuse_unprepared(guard, call)
                known = self._records.get(uid)
                if not claim.results and known is None:
                    return Prepared(()), None
                try:
                    gpus = self._planner.gpus_of(claim, call)
                except NvmlUnavailableError:
                    # The pod may run while the NVIDIA driver is being replaced: it keeps what it has.
                    if self._stands(known, claim):
                        return self._as_recorded(known, guard, call)
                    raise
                self._planner.refuse_unready_imex(claim, known, call)
                gpus |= known.locked_gpus if known else frozenset()
                with ExitStack() as stack:
                    try:
                        held = stack.enter_context(self._held(gpus, claim, known, call))
                    except LockBusyError:
                        # Another operation hangs on the GPU; what the pod has does not need it.
                        if self._stands(known, claim):
                            return self._as_recorded(known, guard, call)
                        raise
                    try:
                        plan = self._planner.plan(claim, known, self._line.ahead_of(attempt))
                    except DeviceLostError:
                        # Its pod keeps the other devices of the claim too, whatever the GPU's taint does with the pod.
                        if self._stands(known, claim):
                            return self._as_recorded(known, guard, call)
                        raise
                    except DeviceHeldError:
                        if known is not None and attempt.number is not None:
                            self._steps.give_back(
                                known, frozenset(result.device for result in claim.results), held
                            )
                        raise
                    if not plan.locked_gpus <= gpus:
                        continue
                    attempt.wanted = plan.held_devices()
                    self._steps.settle(plan, held)
                    call.left()
                    prepared = self._planner.answer(claim, plan)
                    record = self._steps.carry_out(attempt, plan, known, held)
                    guard.note_prepared(call.began_ns)
                    return prepared, record

    def _held(
        self, gpus: frozenset[str], claim: AllocatedClaim, known: ClaimRecord | None, call: KubeletCall
    ) -> AbstractContextManager[HeldGpus]:
        """The locks of GPUs. A prepared claim waits for a moment only."""
        is_prepared = known is not None and known.phase == "prepared" and known.claim == claim
        wait_s = min(call.left(), _PREPARED_WAIT_S) if is_prepared else call.left()
        return self._gpu_locks.hold(gpus, wait_s, call.has_left)

    def _stands(self, known: ClaimRecord | None, claim: AllocatedClaim) -> TypeGuard[ClaimRecord]:
        return known is not None and known.claim == claim and self._steps.stands(known)

    def _as_recorded(
        self, known: ClaimRecord, guard: ClaimGuard, call: KubeletCall
    ) -> tuple[Prepared, ClaimRecord]:
        guard.note_prepared(call.began_ns)
        return self._planner.answer(known.claim, known), known


def _refuse_unprepared(guard: ClaimGuard, call: KubeletCall) -> None:
    """Raises: RetryableError if the claim was unprepared since the call began. If a pod still needs the claim, the
    kubelet has then begun another call."""
    if guard.was_unprepared_since(call.began_ns):
        raise RetryableError(
            "the claim was unprepared while this call was under way; the kubelet calls again if a pod still needs it"
        )
