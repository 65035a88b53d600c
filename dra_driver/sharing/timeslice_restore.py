"""Sets the time slices of claims again after a driver reload, which forgets them."""

from __future__ import annotations

import threading

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.journal.gpu_locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.steps import SetTimeSlice

_log = structlog.get_logger(__name__)

_LOCK_S = 30.0


class TimeSliceRestore:
    """Sets time slices anew, in a thread of its own. MPS daemons are the MPS host's business."""

    def __init__(self, records: RecordStore, locks: GpuLocks, nvidia_smi: NvidiaSmi) -> None:
        self._records = records
        self._locks = locks
        self._nvidia_smi = nvidia_smi

    def driver_changed(self) -> None:
        """The driver was loaded again, or the GPUs are others than before."""
        try:
            threading.Thread(target=self.set_again, name="timeslice-restore", daemon=True).start()
        except RuntimeError:  # no thread can start, and nobody comes back to it: the caller's does it
            self.set_again()

    def set_again(self) -> None:
        """Set what the records say. A GPU that refuses is told and hides no other."""
        try:
            records = self._records.all()
        except DraDriverError as error:
            _log.error("settings_not_kept", reason=str(error))
            return
        for uid, record in records.items():
            for step in record.steps:
                if isinstance(step, SetTimeSlice):
                    self._set(uid, step)

    def _set(self, uid: str, step: SetTimeSlice) -> None:
        try:
            with self._locks.hold({step.gpu_uuid}, _LOCK_S):
                record = self._records.get(uid)
                if record is not None and step in record.steps:
                    self._nvidia_smi.set_time_slice(step.gpu_uuid, step.interval)
                    _log.info("time_slice_set_again", gpu_uuid=step.gpu_uuid, claim_uid=uid)
        except DraDriverError as error:
            _log.error("time_slice_lost", gpu_uuid=step.gpu_uuid, claim_uid=uid, reason=str(error))
