"""Reports the health of devices to the claims that hold them: events at once, their status from a thread of its own.

The status of every claim is compared with what was written after the start, because a plugin that ends may not have
written it any more; when this instance becomes the one that speaks for the node; and when reports were lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.health import HealthChange, HealthTarget
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.claim_status import ClaimStatusReporter
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.rules.device_status import event_of, is_hit

_log = structlog.get_logger(__name__)

_ROUND_S = 5.0
_CLAIMS_A_ROUND = 25
"""No more than the recorder writes in a round, so that its queue has room for other reports."""
_LOST_AGAIN_S = 60.0


@dataclass(eq=False)
class ClaimHealthReporter(BackgroundWorker):
    """Observes the health of GPUs. While `speaks_for_node` says no, another instance of the plugin reports."""

    recorder: EventRecorder
    statuses: ClaimStatusReporter
    records: Callable[[], Mapping[str, ClaimRecord]]
    inventory: Callable[[], Inventory | None]
    created_instance: Callable[[str], OwnedInstance | None]
    speaks_for_node: Callable[[], bool]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._changed_gpus: set[str] = set()  # UUIDs, under the lock
        self._due: dict[str, None] = {}  # claim UIDs, in order
        self._all_are_due = True
        self._dropped = 0
        self._lost_again_at = 0.0
        super().__init__("claim-news", self._round, crash_event="claim_news_failed", on_crash=self._crashed)

    def health_changed(self, change: HealthChange) -> None:
        """The health of a GPU or of an instance became worse or better."""
        with self._lock:
            self._changed_gpus.add(change.target.gpu_uuid)
        self.wake()
        event = event_of(change)
        if event is not None and self.speaks_for_node():
            text = f"{change.target}: {change.text}"
            self.recorder.node_event(event.reason, text, warning=event.warning)
            for ref in self._holders(change.target):
                self.recorder.claim_event(ref, event.reason, text, warning=event.warning)

    def renew_statuses(self) -> None:
        """One round: find the claims whose status may be another, and give some of them. Raises: StateError."""
        if not self.speaks_for_node():
            self._all_are_due = True
            return
        inventory = self.inventory()
        if inventory is None:
            return
        with self._lock:
            changed, self._changed_gpus = self._changed_gpus, set()
        if self._all_are_due or self._were_lost():
            self._all_are_due = False
            self._due = dict.fromkeys(self.records())
        elif changed:
            found = (uid for uid, record in self.records().items() if record.gpu_uuids & changed)
            self._due = dict.fromkeys(found) | self._due
        for uid in list(self._due)[:_CLAIMS_A_ROUND]:
            del self._due[uid]
            self.statuses.renew(uid)

    def _were_lost(self) -> bool:
        """Whether the recorder dropped reports since the last time that this was answered with yes."""
        dropped, now = self.recorder.dropped, self.clock()
        if dropped == self._dropped or now < self._lost_again_at:
            return False
        self._dropped, self._lost_again_at = dropped, now + _LOST_AGAIN_S
        return True

    def _round(self) -> float:
        self.renew_statuses()
        return _ROUND_S

    def _crashed(self, _error: Exception) -> float:
        self._all_are_due = True
        return _ROUND_S

    def _holders(self, target: HealthTarget) -> Sequence[ClaimRef]:
        """The claims that hold something of the target."""
        try:
            inventory, records = self.inventory(), self.records().values()
            return [
                record.ref for record in records if is_hit(record, target, inventory, self.created_instance)
            ]
        except DraDriverError as error:
            _log.warning("holders_unknown", subject=str(target), reason=str(error))
            return ()
