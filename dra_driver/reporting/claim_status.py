"""Keeps `status.devices` of claims up to date: which devices a claim holds, and whether they work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimRef, DeviceStatus, ReportedDevice
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.health import HealthChange, HealthStates, HealthTarget
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.rules.device_status import device_statuses, event_of, is_hit

_log = structlog.get_logger(__name__)


_MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _GivenStatus:
    devices: tuple[DeviceStatus, ...]
    is_written: bool = False

    def written(self) -> None:
        self.is_written = True


@dataclass(eq=False)
class ClaimStatusReporter:
    """Passes a status to the recorder only if this process has not written it, or someone removed it: the kubelet
    prepares every claim again after it restarts. Thread-safe.
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
        """The claim has just been read from the API server."""
        with self._lock:
            self._give(record, record.claim.reported)

    def renew(self, uid: str, reported: frozenset[ReportedDevice] | None = None) -> None:
        """With `reported`, the devices in the current status, do nothing if none is missing there."""
        # The record is read under the lock, so that a newer status from a concurrent Prepare is not
        # overwritten.
        with self._lock:
            try:
                record = self.record(uid)
            except DraDriverError as error:
                _log.warning("claim_status_unknown", claim_uid=uid, reason=str(error))
                return
            if record is not None and record.phase == "prepared":
                self._give(record, reported, only_removed=reported is not None)

    def forget(self, ref: ClaimRef) -> None:
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
        """`reported` are the devices in the claim's current status; None if unknown."""
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
        while len(self._given) >= _MAX_REMEMBERED:
            del self._given[next(iter(self._given))]
        self._given[uid] = given
        if not is_written:
            is_first = known is None and reported == frozenset()
            self.recorder.claim_status(record.ref, statuses, given.written, is_first=is_first)


_CLAIMS_AT_ONCE = 10
"""No more than the recorder writes between two calls: its queue needs room."""
_LOST_AGAIN_S = 60.0


@dataclass(eq=False)
class ClaimHealthReporter:
    recorder: EventRecorder
    statuses: ClaimStatusReporter
    records: Callable[[], Mapping[str, ClaimRecord]]
    inventory: Callable[[], Inventory | None]
    created_instance: Callable[[str], OwnedInstance | None]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._changed_gpus: set[str] = set()  # UUIDs, under the lock
        self._due: dict[str, None] = {}  # claim UIDs, in order
        self._all_are_due = True
        self._dropped = 0
        self._lost_again_at = 0.0

    def health_changed(self, change: HealthChange) -> None:
        with self._lock:
            self._changed_gpus.add(change.target.gpu_uuid)
        event = event_of(change)
        if event is not None:
            (reason, is_warning), text = event, f"{change.target}: {change.text}"
            self.recorder.node_event(reason, text, warning=is_warning)
            for ref in self._holders(change.target):
                self.recorder.claim_event(ref, reason, text, warning=is_warning)

    def renew_statuses(self) -> None:
        """Renew some of the statuses that may have changed. Called every two seconds. Raises: StateError."""
        inventory = self.inventory()
        if inventory is None:
            return
        records = self.records()
        with self._lock:
            changed, self._changed_gpus = self._changed_gpus, set()
        if self._all_are_due or self._were_lost():
            self._all_are_due = False
            self._due = dict.fromkeys(records)
        elif changed:
            found = (uid for uid, record in records.items() if record.gpu_uuids & changed)
            self._due = dict.fromkeys(found) | self._due
        for uid in list(self._due)[:_CLAIMS_AT_ONCE]:
            del self._due[uid]
            self.statuses.renew(uid)

    def _were_lost(self) -> bool:
        """Whether the recorder dropped reports since the last True; at most once a minute."""
        dropped, now = self.recorder.dropped, self.clock()
        if dropped == self._dropped or now < self._lost_again_at:
            return False
        self._dropped, self._lost_again_at = dropped, now + _LOST_AGAIN_S
        return True

    def _holders(self, target: HealthTarget) -> Sequence[ClaimRef]:
        try:
            inventory, records = self.inventory(), self.records().values()
            return [
                record.ref for record in records if is_hit(record, target, inventory, self.created_instance)
            ]
        except DraDriverError as error:
            _log.warning("gpu_claims_unknown", subject=str(target), reason=str(error))
            return ()
