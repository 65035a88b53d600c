"""The state of claims as the API server is told it: what they hold, and whether that can do its work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from dra_driver.core.claimstate import device_statuses
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.health import HealthStates
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.notices import DeviceStatus
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_MOST_REMEMBERED = 1024


class Announcer(Protocol):
    """The queue of what users get to see; never waits, never raises."""

    def claim_status(
        self, ref: ClaimRef, devices: Sequence[DeviceStatus], written: Callable[[], None]
    ) -> None:
        """The state of our devices in a claim; `written` is called once that was written."""

    def claim_gone(self, ref: ClaimRef) -> None:
        """The claim holds nothing of ours any more."""


@dataclass(slots=True)
class _State:
    """A claim's state as it was given to the announcer, and whether the API server took it."""

    devices: tuple[DeviceStatus, ...]
    is_written: bool = False

    def written(self) -> None:
        self.is_written = True


class ClaimStates:
    """Gives states to the announcer; safe for several threads.

    Only what differs from what this process wrote last: the kubelet prepares every claim again after each restart
    of its own. `record` answers a claim's record by its UID.
    """

    def __init__(
        self,
        announcer: Announcer,
        inventory: Callable[[], Inventory | None],
        realised: Callable[[str], OwnedInstance | None],
        health: Callable[[], HealthStates],
        record: Callable[[str], ClaimRecord | None],
    ) -> None:
        self._announcer = announcer
        self._inventory = inventory
        self._realised = realised
        self._health = health
        self._record = record
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}  # by claim UID

    def prepared(self, record: ClaimRecord) -> None:
        """Give the state of a claim that was prepared just now, until it was written."""
        with self._lock:
            self._give(record, until_written=True)

    def renew(self, uid: str, *, until_written: bool) -> None:
        """Give a claim's state if it is another than was given last or, `until_written`, than was written."""
        # Read under the lock: what a Prepare that ends meanwhile gives is newer, and must stay the last.
        with self._lock:
            try:
                record = self._record(uid)
            except DraDriverError as error:
                _log.warning("claim_status_unknown", claim_uid=uid, reason=str(error))
                return
            if record is not None and record.phase == "prepared":
                self._give(record, until_written=until_written)

    def forget(self, ref: ClaimRef) -> None:
        """The claim is not prepared (any more); the API server removes its status with the allocation."""
        with self._lock:
            self._states.pop(ref.uid, None)
            self._announcer.claim_gone(ref)

    def _give(self, record: ClaimRecord, *, until_written: bool) -> None:
        uid = record.ref.uid
        try:
            statuses = device_statuses(record, self._inventory(), self._realised, self._health())
        except DraDriverError as error:
            _log.warning("claim_status_unknown", claim_uid=uid, reason=str(error))
            return
        known = self._states.pop(uid, None)
        is_same = known is not None and known.devices == statuses
        is_told = is_same and known is not None and (known.is_written or not until_written)
        state = known if known is not None and is_told else _State(statuses)
        while len(self._states) >= _MOST_REMEMBERED:
            del self._states[next(iter(self._states))]
        self._states[uid] = state
        if not is_told:
            self._announcer.claim_status(record.ref, statuses, state.written)
