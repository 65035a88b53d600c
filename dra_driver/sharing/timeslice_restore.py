"""Sets the time slices of claims again after a driver reload, which forgets them."""

from __future__ import annotations

from contextvars import Context
from functools import partial

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.journal.lanes import Lanes, Operation
from dra_driver.journal.records import RecordStore
from dra_driver.model.steps import SetTimeSlice

_log = structlog.get_logger(__name__)


class TimeSliceRestore:
    """Sets time slices anew, in the lanes of their GPUs. MPS daemons are the MPS host's business."""

    def __init__(self, records: RecordStore, lanes: Lanes, nvidia_smi: NvidiaSmi) -> None:
        self._records = records
        self._lanes = lanes
        self._nvidia_smi = nvidia_smi

    def driver_changed(self) -> None:
        """The NVIDIA driver was loaded again, or the GPUs are others than before. Waits for nothing."""
        try:
            records = self._records.all()
        except DraDriverError as error:
            _log.error("settings_not_kept", reason=str(error))
            return
        for uid, record in records.items():
            for step in record.steps:
                if isinstance(step, SetTimeSlice):
                    what = "the setting of the time slice after a reload of the NVIDIA driver"
                    self._lanes.ask({step.gpu_uuid}, what, partial(self._set, uid, step), context=Context())

    def _set(self, uid: str, step: SetTimeSlice, _operation: Operation) -> None:
        """A GPU that refuses is told and hides no other."""
        try:
            record = self._records.get(uid)
            if record is not None and step in record.steps:
                self._nvidia_smi.set_time_slice(step.gpu_uuid, step.interval)
                _log.info("time_slice_set_again", gpu_uuid=step.gpu_uuid, claim_uid=uid)
        except DraDriverError as error:
            _log.error("time_slice_lost", gpu_uuid=step.gpu_uuid, claim_uid=uid, reason=str(error))
