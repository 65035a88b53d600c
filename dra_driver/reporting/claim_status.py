"""Keeps `status.devices` of claims up to date: which devices a claim holds, and whether they can do their work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimRef, DeviceStatus, ReportedDevice
from dra_driver.model.health import HealthStates
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.rules.device_status import device_statuses

_log = structlog.get_logger(__name__)

_MOST_REMEMBERED = 1024


@dataclass(slots=True)
class _GivenStatus:
    """A claim's status as it was given to the recorder, and whether the API server has stored it."""

    devices: tuple[DeviceStatus, ...]
    is_written: bool = False

    def written(self) -> None:
        self.is_written = True


@dataclass(eq=False)
class ClaimStatusReporter:
    """Gives the status of claims to the recorder; safe for several threads.

    It gives only what differs from what this process wrote last, or what was removed from the claim since: after each
    restart of its own, the kubelet prepares every claim again. `record` returns a claim's record by its UID.
    """

    recorder: EventRecorder
    inventory: Callable[[], Inventory | None]
    created_instance: Callable[[str], OwnedInstance | None]
    health: Callable[[], HealthStates]
    record: Callable[[str], ClaimRecord | None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[str, _GivenStatus] = {}  # by claim UID

    def prepared(self, record: ClaimRecord) -> None:
        """A claim was prepared, and has just been read from the API server: give its status if that is not written yet,
        or not there any more."""
        with self._lock:
            self._give(record, record.claim.reported)

    def renew(self, uid: str, reported: frozenset[ReportedDevice] | None = None) -> None:
        """Give a claim's status if it differs from what was written. With `reported`, the devices that the status names
        now, give it only if one is missing there."""
        # The record is read under the lock: a Prepare that ends meanwhile gives a newer status, which must stay.
        with self._lock:
            try:
                record = self.record(uid)
            except DraDriverError as error:
                _log.warning("claim_status_unknown", claim_uid=uid, reason=str(error))
                return
            if record is not None and record.phase == "prepared":
                self._give(record, reported, only_removed=reported is not None)

    def forget(self, ref: ClaimRef) -> None:
        """The claim is not prepared (any more). The API server removes its status together with its allocation."""
        with self._lock:
            self._given.pop(ref.uid, None)
            self.recorder.claim_gone(ref)

    def _give(
        self,
        record: ClaimRecord,
        reported: frozenset[ReportedDevice] | None,
        *,
        only_removed: bool = False,
    ) -> None:
        """`reported` are the devices that the claim's status names now; None if that is not known."""
        uid = record.ref.uid
        try:
            statuses = device_statuses(record, self.inventory(), self.created_instance, self.health())
        except DraDriverError as error:
            _log.warning("claim_status_unknown", claim_uid=uid, reason=str(error))
            return
        named = None if reported is None else {device[1:] for device in reported}
        is_there = named is None or all(
            (one.pool, one.device, one.share_id or None) in named for one in statuses
        )
        if is_there and only_removed:
            return
        known = self._given.pop(uid, None)
        is_written = is_there and known is not None and known.is_written and known.devices == statuses
        given = known if known is not None and is_written else _GivenStatus(statuses)
        while len(self._given) >= _MOST_REMEMBERED:
            del self._given[next(iter(self._given))]
        self._given[uid] = given
        if not is_written:
            is_first = known is None and reported == frozenset()
            self.recorder.claim_status(record.ref, statuses, given.written, is_first=is_first)
