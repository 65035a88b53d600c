"""Telling the claims that hold a device how it is: events at once, their status from a thread of its own.

After the start the status of every claim is looked at once, because a plugin that ends may not have written it
any more; likewise when this instance becomes the one that tells, and when notices were lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from dra_driver.core.claimstate import is_hit
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.health import HealthChange, Severity, Subject
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.notices import GPU_LOST, GPU_RECOVERED, GPU_UNHEALTHY
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_ROUND_S = 5.0
_AT_ONCE = 25
"""Per round: no more than is written in the same time, so that the queue has room for others."""
_LOST_AGAIN_S = 60.0


class Announcer(Protocol):
    """The queue of what users get to see; never waits, never raises."""

    @property
    def dropped(self) -> int:
        """How many notices nobody will see."""

    def claim_event(self, ref: ClaimRef, reason: str, message: str, *, warning: bool) -> None:
        """An event for a claim and its pods."""

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        """An event for this node."""


class States(Protocol):
    """The state of claims in the API server."""

    def renew(self, uid: str, *, until_written: bool) -> None:
        """Give a claim's state if it is another than was given last or, `until_written`, than was written."""


class ClaimNews:
    """Observes the health of GPUs. While `may_tell` says no, another instance of the plugin tells."""

    def __init__(
        self,
        announcer: Announcer,
        states: States,
        records: Callable[[], Mapping[str, ClaimRecord]],
        inventory: Callable[[], Inventory | None],
        realised: Callable[[str], OwnedInstance | None],
        may_tell: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announcer = announcer
        self._states = states
        self._records = records
        self._inventory = inventory
        self._realised = realised
        self._may_tell = may_tell
        self._clock = clock
        self._lock = threading.Lock()
        self._hit: set[str] = set()  # UUIDs of GPUs, under the lock
        self._due: dict[str, bool] = {}  # by claim UID, whether until it was written
        self._everything = True
        self._dropped = 0
        self._lost_again_at = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="claim-news", daemon=True)

    def start(self) -> None:
        """Begin to look after the status of claims."""
        self._thread.start()

    def stop(self) -> None:
        """End; harmless before the start."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def devices_changed(self) -> None:
        """The inventory is another one, maybe the first."""
        self._wake.set()

    def health_changed(self, change: HealthChange) -> None:
        """A GPU or an instance went bad or well."""
        with self._lock:
            self._hit.add(change.subject.gpu_uuid)
        self._wake.set()
        if change.after > change.before and change.after >= Severity.DEGRADED:
            self._tell(change, GPU_LOST if change.after == Severity.LOST else GPU_UNHEALTHY, warning=True)
        elif change.before >= Severity.DEGRADED > change.after:
            self._tell(change, GPU_RECOVERED, warning=False)

    def look(self) -> None:
        """One round: find the claims whose status may be another, and give some of them. Raises: StateError."""
        if not self._may_tell():
            self._everything = True
            return
        inventory = self._inventory()
        if inventory is None:
            return
        with self._lock:
            hit, self._hit = self._hit, set()
        if self._everything or self._were_lost():
            self._everything = False
            self._due = dict.fromkeys(self._records(), True)
        elif hit:
            found = (uid for uid, record in self._records().items() if record.gpu_uuids & hit)
            self._due = dict.fromkeys(found, False) | self._due
        for uid in list(self._due)[:_AT_ONCE]:
            self._states.renew(uid, until_written=self._due.pop(uid))

    def _were_lost(self) -> bool:
        dropped, now = self._announcer.dropped, self._clock()
        if dropped == self._dropped or now < self._lost_again_at:
            return False
        self._dropped, self._lost_again_at = dropped, now + _LOST_AGAIN_S
        return True

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                self.look()
            except Exception:  # noqa: BLE001  a dead thread would tell nothing any more
                _log.exception("claim_news_failed")
                self._everything = True
            self._wake.wait(_ROUND_S)

    def _tell(self, change: HealthChange, reason: str, *, warning: bool) -> None:
        """On the node, and on every claim that holds something of what is hit."""
        if not self._may_tell():
            return
        text = f"{change.subject}: {change.text}"
        self._announcer.node_event(reason, text, warning=warning)
        for ref in self._holders(change.subject):
            self._announcer.claim_event(ref, reason, text, warning=warning)

    def _holders(self, subject: Subject) -> Sequence[ClaimRef]:
        try:
            inventory, records = self._inventory(), self._records().values()
            return [record.ref for record in records if is_hit(record, subject, inventory, self._realised)]
        except DraDriverError as error:
            _log.warning("holders_unknown", subject=str(subject), reason=str(error))
            return ()
