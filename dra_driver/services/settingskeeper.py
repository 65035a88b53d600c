"""Settings of GPUs that a driver reload forgets are made again for the claims that asked for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice
from dra_driver.services.sharingsteps import TimeSlices

_log = structlog.get_logger(__name__)

_LOCK_S = 30.0


class Records(Protocol):
    """The claim records."""

    def get(self, uid: str) -> ClaimRecord | None:
        """One claim's record."""

    def all(self) -> Mapping[str, ClaimRecord]:
        """Every record by claim UID."""


class Locks(Protocol):
    """Locks on physical GPUs."""

    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> AbstractContextManager[None]:
        """Hold all of them."""


class SettingsKeeper:
    """Sets time slices anew, in a thread of its own. MPS daemons are the MPS host's business."""

    def __init__(self, records: Records, locks: Locks, time_slices: TimeSlices) -> None:
        self._records = records
        self._locks = locks
        self._time_slices = time_slices

    def driver_changed(self) -> None:
        """The driver was loaded again, or the GPUs are others than before."""
        threading.Thread(target=self.set_again, name="settings-keeper", daemon=True).start()

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
                    self._time_slices.set_time_slice(step.gpu_uuid, step.interval)
                    _log.info("time_slice_set_again", gpu_uuid=step.gpu_uuid, claim_uid=uid)
        except DraDriverError as error:
            _log.error("time_slice_lost", gpu_uuid=step.gpu_uuid, claim_uid=uid, reason=str(error))
