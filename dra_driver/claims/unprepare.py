"""Unprepares claims for the kubelet, and for the reconciler if the kubelet forgot one."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from structlog.contextvars import bound_contextvars

from dra_driver.base.deadline import until
from dra_driver.claims.calls import CallsUnderWay, KubeletCall, Observer, failed
from dra_driver.errors import RetryableError
from dra_driver.journal.executor import Executor
from dra_driver.journal.records import ClaimGuard, RecordStore
from dra_driver.model.claim import ClaimRef, UnprepareOutcome
from dra_driver.model.dataclass import dataclass
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_RECLAIM_S = 30.0


@dataclass(eq=False)
class Unpreparer:
    """Removes files and record under the claim's lock, then undoes changes to a GPU in the GPU's lane."""

    records: RecordStore
    executor: Executor
    calls: CallsUnderWay
    observer: Observer

    def reclaim(self, ref: ClaimRef, expected: ClaimRecord, checked_ns: int) -> bool:
        """Unprepare a claim as if the kubelet had called; return whether that was done.

        Not if its record is no longer `expected`, or if the claim is being prepared or was prepared after
        `checked_ns` (time.monotonic_ns(), when the API server was queried).

        Raises: the error that prevented the Unprepare; the record stays, unless only the cleanup failed.
        """
        call = KubeletCall(time.monotonic_ns(), time.monotonic() + _RECLAIM_S)

        def is_wanted(guard: ClaimGuard) -> bool:
            is_newer = guard.was_prepared_since(checked_ns) or self.calls.is_in_progress("prepare", ref.uid)
            return is_newer or self.records.get(ref.uid) != expected

        with until(call.deadline), bound_contextvars(claim_uid=ref.uid):
            return self._unprepare(ref, call, is_wanted)

    def unprepare(self, ref: ClaimRef, call: KubeletCall) -> UnprepareOutcome:
        """Return None if the claim is unprepared, or never was prepared."""
        started = time.monotonic()
        try:
            self._unprepare(ref, call, lambda _guard: False)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            return failed(self.observer, "unprepare", ref, time.monotonic() - started, error)
        return None

    def _unprepare(self, ref: ClaimRef, call: KubeletCall, is_wanted: Callable[[ClaimGuard], bool]) -> bool:
        started = time.monotonic()
        with self.calls.calling("unprepare", ref.uid):
            with self.records.locks.hold(ref.uid, call.left(), call.is_cancelled) as guard:
                if is_wanted(guard):
                    return False
                if guard.was_prepared_by_call_after(call.began_ns):
                    raise RetryableError(
                        "the claim was prepared again after this call began; the kubelet retries"
                    )
                record = self.records.get(ref.uid)
                call.left()  # raises if the kubelet has cancelled this call: a newer call may follow
                self.executor.remove(ref, record)
                guard.note_unprepared(call.began_ns)
            self.executor.undo_rest(ref.uid)
        duration = time.monotonic() - started
        self.observer.unprepared(ref, duration, record)
        _log.info(
            "claim_unprepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[] if record is None else [held.device for held in record.devices],
            duration_s=round(duration, 4),
        )
        return True
