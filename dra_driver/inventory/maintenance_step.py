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

After a reboot the file is ignored, and the claim counts as not prepared yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from dra_driver.base.deadline import seconds_for
from dra_driver.errors import DeviceBusyError, DraDriverError, RetryableError
from dra_driver.inventory.detachment import Detachments
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import ClaimRef
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord, StartMaintenance
from dra_driver.model.units import named

_log = structlog.get_logger(__name__)

_WITHDRAWING_S, _CLOSING_S = 10.0, 30.0
_POLL_S = 0.1
_MAX_NAMED = 8


@dataclass(eq=False)
class MaintenanceSteps:
    """Closes NVML for a maintenance claim, and lets discovery open it again.

    `is_offered` returns whether the API server may still list a device of the given GPUs. `publish` makes the plugin
    write the slices soon, and `rescan` makes discovery check NVML soon.
    """

    detachments: Detachments
    records: RecordStore
    ledger: Ledger
    is_offered: Callable[[Collection[str]], bool]
    publish: Callable[[], None]
    rescan: Callable[[], None]

    def open(self) -> None:
        """Remove an unreadable file, and the file that a crash left for a claim that is not prepared. Call this
        before NVML is opened. Raises: StateError.
        """
        written, records = self.detachments.written(), self.records.all()
        if written is None:
            self.detachments.end()
        if written is None or written.claim is None:
            return
        uid = written.claim.uid
        is_unreadable = any(path.name.startswith(uid) for path in self.records.quarantined())
        if not (is_unreadable or (uid in records and records[uid].phase == "prepared")):
            self.detachments.end_of(written.claim)
            _log.info("maintenance_abandoned", claim=str(written.claim), claim_uid=uid)

    def do(self, step: StartMaintenance, plan: Plan) -> None:
        """Close NVML once nothing uses the GPUs. Does nothing for a prepared claim, whose maintenance has
        already started.

        Raises: DeviceBusyError that names the claims on the GPUs, or the maintenance claim on other GPUs;
        RetryableError, including if NVML is not closed in time; StateError.
        """
        ref = plan.claim.ref
        if self._is(ref, "prepared"):
            return
        self.publish()
        self._refuse_users(step, plan)
        self._wait_withdrawn(step)
        made = self.detachments.begin(step.timeout_s, ref, step.gpu_uuids)
        try:
            if not self._is(ref, "preparing"):
                raise RetryableError("the claim was unprepared while NVML was being closed for it")
            self.rescan()
            self.detachments.wait_closed(made, seconds_for("close NVML", _CLOSING_S))
        except DraDriverError:
            self.undo_closing(ref)
            raise
        _log.info("maintenance_started", claim_uid=ref.uid, gpu_uuids=step.gpu_uuids, until=made.until)

    def undo(self, step: StartMaintenance, record: ClaimRecord) -> None:
        """Let the plugin open NVML again if it was closed for the claim, and publish the GPUs. Raises: StateError."""
        if self.undo_closing(record.ref):
            _log.info("maintenance_ended", claim_uid=record.ref.uid, gpu_uuids=step.gpu_uuids)
        self.publish()

    def in_place(self, step: StartMaintenance, record: ClaimRecord) -> bool:
        """Return True: NVML is not closed a second time for a claim."""
        return True

    def undo_closing(self, ref: ClaimRef) -> bool:
        """Let the plugin open NVML again if it was closed for the claim; return whether it was. Raises: StateError."""
        was_closed = self.detachments.end_of(ref)
        if was_closed:
            self.rescan()
        return was_closed

    def _is(self, ref: ClaimRef, phase: str) -> bool:
        record = self.records.get(ref.uid)
        return record is not None and record.phase == phase

    def _refuse_users(self, step: StartMaintenance, plan: Plan) -> None:
        """Raises: DeviceBusyError."""
        if plan.waits_for:
            raise DeviceBusyError(
                f"waits for the claims on its GPUs: {named(plan.waits_for, _MAX_NAMED)}; maintenance starts when their "
                "pods are gone"
            )
        if pending := self.ledger.pending_before(step.gpu_uuids):
            raise DeviceBusyError(f"maintenance starts after the cleanup of its GPUs. {pending[0].text}")

    def _wait_withdrawn(self, step: StartMaintenance) -> None:
        """Wait until the API server lists no device of the GPUs; until then the scheduler could still allocate one.
        Raises: RetryableError.
        """
        end = time.monotonic() + seconds_for("withdraw the GPUs", _WITHDRAWING_S)
        while self.is_offered(step.gpu_uuids):
            if time.monotonic() >= end:
                raise RetryableError(
                    f"the ResourceSlices of this node still have devices of GPU {', '.join(step.gpu_uuids)}; "
                    "maintenance starts when the plugin has removed them"
                )
            time.sleep(_POLL_S)
