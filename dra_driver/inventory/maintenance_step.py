"""The step that takes the GPUs of a maintenance claim out of service.

    recorded ──no claim or cleanup on the GPUs, slices without them──▶ closing ──NVML closed──▶ active ──────▶ over
       ▲  └── retried                                                    │                        │     Unprepare
       └──────────── a process does not close NVML, file removed ◀───────┘                        └─ timeout ─▶ overdue

| A crash … | leaves | What happens next |
|---|---|---|
| before the file | the record, and the GPUs withdrawn | the kubelet prepares or unprepares the claim |
| between the file and `prepared` | record and file | the next start removes the file; the kubelet continues as above |
| active | record and file | the next instance keeps NVML closed, and does not change the slices |
| between removing the record and the file | the file | the next start, or the next Unprepare, removes the file |

Only a holder of the claim's lock writes or removes the file, except `detach --end`, and anyone may replace a file whose
time is over. The step waits for NVML to close without the lock, because that may hang. So `Executor.complete` checks
under the lock that NVML is still closed for the claim before it writes `prepared`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

import structlog

from dra_driver.base.deadline import seconds_for
from dra_driver.base.file_lock import LockBusyError
from dra_driver.errors import DeviceBusyError, DraDriverError, RetryableError, StateError
from dra_driver.inventory.detachment import Detachments
from dra_driver.journal.lanes import refuse_given_up
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.maintenance import Detachment
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import StartMaintenance
from dra_driver.model.units import named

_log = structlog.get_logger(__name__)

_WITHDRAWING_S, _CLOSING_S = 10.0, 30.0
_LOCK_S = 5.0
_STILL_CLOSED_S = 1.0
"""How long a process that only checks whether it may open NVML can make NVML look open."""
_POLL_S = 0.1
_MAX_NAMED = 8


@dataclass(eq=False)
class MaintenanceSteps:
    """Closes NVML for a maintenance claim, and lets discovery open it again. Methods raise StateError.

    `is_offered` returns whether the API server may still list a device of the given GPUs.
    """

    detachments: Detachments
    records: RecordStore
    ledger: Ledger
    is_offered: Callable[[Collection[str]], bool]
    publish: Callable[[], None]
    rescan: Callable[[], None]

    def open(self) -> None:
        """Remove a damaged file, and the file that a crash left for a claim that is not prepared, before NVML is
        opened.
        """
        try:
            written = self.detachments.written()
        except StateError:
            return
        if written is None:
            with suppress(LockBusyError):
                self.detachments.remove_damaged()
        elif written.claim is not None:
            with suppress(LockBusyError):
                self._end_abandoned(written.claim)

    def _end_abandoned(self, ref: ClaimRef) -> None:
        records = self.records.all()  # also finds unreadable records
        is_unreadable = any(path.name.startswith(ref.uid) for path in self.records.quarantined())
        is_prepared = ref.uid in records and records[ref.uid].phase == "prepared"
        if not (is_unreadable or is_prepared) and self.detachments.end_of(ref):
            _log.info("maintenance_abandoned", claim=str(ref), claim_uid=ref.uid)

    def do(self, step: StartMaintenance, plan: Plan) -> None:
        """Close NVML once nothing uses the GPUs. Does nothing for a prepared claim.

        Raises: DeviceBusyError that names the claims in the way; RetryableError.
        """
        ref = plan.claim.ref
        if self._is_prepared(ref, step):
            return
        self.publish()
        self._refuse_users(step, plan)
        self._wait_withdrawn(step)
        with self.records.locks.hold(ref.uid, _LOCK_S):
            if self._is_prepared(ref, step):
                return
            refuse_given_up()
            made = self.detachments.begin(step.timeout_s, ref, step.gpu_uuids)
        try:
            self.rescan()
            self.detachments.wait_closed(made, seconds_for("close NVML", _CLOSING_S))
            refuse_given_up()
        except DraDriverError:
            self._give_back(made, ref)
            raise
        _log.info("maintenance_started", claim_uid=ref.uid, gpu_uuids=step.gpu_uuids, until=made.until)

    def undo(self, step: StartMaintenance, ref: ClaimRef) -> None:
        """Let the plugin open NVML again if it was closed for the claim, and publish the GPUs, under the claim's lock.

        A pod must always be able to end: if the file cannot be read or removed, NVML stays closed until the time in the
        file is over or the plugin starts again.
        """
        try:
            if self.detachments.end_of(ref):
                self.rescan()
                _log.info("maintenance_ended", claim_uid=ref.uid, gpu_uuids=step.gpu_uuids)
        except StateError as error:
            _log.error(
                "maintenance_not_ended",
                claim_uid=ref.uid,
                reason=str(error),
                remedy="if NVML is closed for this claim, it opens when the time is over; "
                "`gpu-dra-driver detach --end` opens it at once",
            )
        self.publish()

    def in_place(self, step: StartMaintenance, record: ClaimRecord) -> bool:
        """Whether NVML is closed for the claim. True for a prepared claim: NVML is not closed for it a second time."""
        if record.phase == "prepared":
            return True
        try:
            made = self.detachments.now()
            if made is None or made.claim != record.ref:
                return False
            self.detachments.wait_closed(made, _STILL_CLOSED_S)
        except (RetryableError, StateError):
            return False
        return True

    def _give_back(self, made: Detachment, ref: ClaimRef) -> None:
        with self.records.locks.hold(ref.uid, _LOCK_S):
            if self.detachments.written() == made:
                self.detachments.end_of(ref)
                self.rescan()

    def _is_prepared(self, ref: ClaimRef, step: StartMaintenance) -> bool:
        record = self.records.get(ref.uid)
        if record is None or step not in record.steps:
            raise RetryableError("the claim was unprepared or changed while NVML was being closed for it")
        return record.phase == "prepared"

    def _refuse_users(self, step: StartMaintenance, plan: Plan) -> None:
        if plan.waits_for:
            raise DeviceBusyError(
                f"waits for the claims on its GPUs: {named(plan.waits_for, _MAX_NAMED)}; maintenance starts when their "
                "pods are gone"
            )
        if pending := self.ledger.pending_before(step.gpu_uuids):
            raise DeviceBusyError(f"maintenance starts after the cleanup of its GPUs. {pending[0].text}")

    def _wait_withdrawn(self, step: StartMaintenance) -> None:
        end = time.monotonic() + seconds_for("withdraw the GPUs", _WITHDRAWING_S)
        while self.is_offered(step.gpu_uuids):
            if time.monotonic() >= end:
                raise RetryableError(
                    f"the ResourceSlices of this node still have devices of GPU {', '.join(step.gpu_uuids)}; "
                    "maintenance starts when the plugin has removed them"
                )
            time.sleep(_POLL_S)
