"""Sends events and claim statuses to the API server from a separate thread.

The queue is bounded, merges equal reports, and limits the rate. A caller never waits and never gets an error.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import structlog

from dra_driver.base.backoff import Backoff, TokenBucket
from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, DraDriverError
from dra_driver.kube.claim_status_client import ClaimStatusClient
from dra_driver.kube.events import EventWriter
from dra_driver.model.claim import ClaimRef, DeviceStatus
from dra_driver.model.dataclass import KW_ONLY, dataclass, field, replace
from dra_driver.model.problems import EventObject, EventReason, claim_object, node_object

_log = structlog.get_logger(__name__)

_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Times are in seconds.

    The same event is sent again only after `again_s`, with its count. A claim's status waits for `settle_s`, so that
    the kubelet's concurrent calls are answered first.
    """

    most: int = 256
    events_per_s: float = 1.0
    events_at_once: int = 25
    statuses_per_s: float = 5.0
    statuses_at_once: int = 50
    settle_s: float = 0.1
    again_s: float = 60.0
    backoff_first_s: float = 1.0
    backoff_most_s: float = 30.0
    give_up_s: float = 240.0


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    ref: ClaimRef
    reason: EventReason
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """A `minor` event is sent after all others, and dropped before them."""

    about: EventObject
    reason: EventReason
    message: str
    warning: bool
    minor: bool = False


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The status of all our devices in a claim. `is_first`: Prepare just read the claim, and it had no status."""

    ref: ClaimRef
    devices: tuple[DeviceStatus, ...]
    written: Callable[[], None] = field(compare=False)
    is_first: bool = field(default=False, compare=False)


Report = ClaimEvent | ObjectEvent | ClaimState


@dataclass(slots=True)
class QueuedReport:
    report: Report
    times: int
    due: float


class EventQueue:
    """Not thread-safe. Times are seconds of a monotonic clock."""

    def __init__(self, limits: ReportLimits) -> None:
        self._limits = limits
        self._queued: OrderedDict[Hashable, QueuedReport] = OrderedDict()
        self._sent_at: OrderedDict[Hashable, float] = OrderedDict()
        self._events = TokenBucket(limits.events_per_s, limits.events_at_once)
        self._statuses = TokenBucket(limits.statuses_per_s, limits.statuses_at_once)
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._queued)

    def put(self, report: Report, now: float) -> list[Report]:
        """Add a report, and return the reports that a full queue drops: minor events first, claim statuses last."""
        key = _key(report)
        known = self._queued.get(key)
        if known is not None:
            known.report = report
            known.times += 1
            return []
        self._queued[key] = QueuedReport(report, 1, self._due(key, now))
        gone: list[Report] = []
        while len(self._queued) > self._limits.most:
            least = min(self._queued, key=lambda key: _weight(self._queued[key].report))
            gone.append(self._queued.pop(least).report)
        return gone

    def _due(self, key: Hashable, now: float) -> float:
        if isinstance(key, ClaimRef):
            return now + self._limits.settle_s
        sent_at = self._sent_at.get(key)
        return now if sent_at is None else max(now, sent_at + self._limits.again_s)

    def withdraw_state(self, ref: ClaimRef) -> None:
        self._queued.pop(ref, None)

    def put_first(self, queued: QueuedReport) -> None:
        """Put a report from `take`, or a part of it, back, even if the queue is full."""
        key = _key(queued.report)
        newer = self._queued.get(key)
        if newer is not None:
            newer.times += queued.times
            newer.due = min(newer.due, queued.due)
        else:
            self._queued[key] = queued
        self._queued.move_to_end(key, last=False)

    def take(self, now: float, *, hurry: bool = False) -> QueuedReport | None:
        """Remove and return the first report that may be sent now, minor events last.

        `hurry` ignores that the same event was sent recently.
        """
        ready = (entry for entry in self._queued.values() if self._ready_at(entry, now, hurry=hurry) <= now)
        queued = min(ready, key=lambda entry: is_minor(entry.report), default=None)
        if queued is None:
            return None
        key = _key(queued.report)
        del self._queued[key]
        self._bucket(queued).take(now)
        if not isinstance(queued.report, ClaimState):
            self._sent_at.pop(key, None)
            self._sent_at[key] = now
            if len(self._sent_at) > _REMEMBERED:
                self._sent_at.popitem(last=False)
        return queued

    def ready_at(self, now: float, *, hurry: bool = False) -> float | None:
        moments = (self._ready_at(queued, now, hurry=hurry) for queued in self._queued.values())
        return min(moments, default=None)

    def pause(self, until: float) -> None:
        self._paused_until = until

    def forget_due_before(self, moment: float) -> int:
        """Drop events, and return their number. Claim statuses never expire."""
        old = [
            key
            for key, queued in self._queued.items()
            if queued.due < moment and not isinstance(queued.report, ClaimState)
        ]
        for key in old:
            del self._queued[key]
        return len(old)

    def _ready_at(self, queued: QueuedReport, now: float, *, hurry: bool) -> float:
        due = now if hurry else queued.due
        return max(due, self._paused_until, self._bucket(queued).ready_at(now))

    def _bucket(self, queued: QueuedReport) -> TokenBucket:
        return self._statuses if isinstance(queued.report, ClaimState) else self._events


def is_minor(report: Report) -> bool:
    return isinstance(report, ObjectEvent) and report.minor


def _weight(report: Report) -> int:
    if isinstance(report, ClaimState):
        return 2
    return 0 if is_minor(report) else 1


def _key(report: Report) -> Hashable:
    return report.ref if isinstance(report, ClaimState) else report


_FLUSH_S: Final = 2.0
_MAX_PODS = 16
_MAX_RETRY_AFTER_S = 120.0


@dataclass(eq=False)
class EventRecorder(BackgroundWorker):
    """A bounded queue and the thread that sends its reports. Thread-safe. `dropped` does not count minor events."""

    node: str
    events: EventWriter
    claims: ClaimStatusClient
    _: KW_ONLY
    limits: ReportLimits = ReportLimits()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._queue = EventQueue(self.limits)
        self._lock = threading.Lock()
        self._stop_by: float | None = None
        self._backoff = Backoff(self.limits.backoff_first_s, self.limits.backoff_most_s)
        self._is_down = False
        self._logged: set[tuple[str, int]] = set()
        self.dropped = 0
        self.written = 0
        self.failed = 0
        super().__init__("event-recorder", self._turn, self._crashed)

    def counts(self) -> dict[str, int]:
        return {"written": self.written, "dropped": self.dropped, "failed": self.failed}

    def stop(self) -> bool:
        """Send what it can within two seconds, and drop the rest."""
        with self._lock:
            if self._stop_by is None:
                self._stop_by = self.clock() + _FLUSH_S
        self.wake()
        has_ended = self.wait_ended(_FLUSH_S)
        self.retire()
        with self._lock:
            self.dropped += len(self._queue)
            self._queue = EventQueue(self.limits)
        return has_ended

    def claim_event(self, ref: ClaimRef, reason: EventReason, message: str, *, warning: bool) -> None:
        """Report an event for a claim and the pods that use it."""
        self._put(ClaimEvent(ref, reason, message, warning))

    def minor_claim_event(self, ref: ClaimRef, reason: EventReason, message: str) -> None:
        """Report an event for a claim only, which may be dropped."""
        self._put(ObjectEvent(claim_object(ref), reason, message, warning=False, minor=True))

    def node_event(self, reason: EventReason, message: str, *, warning: bool, minor: bool = False) -> None:
        self._put(ObjectEvent(node_object(self.node), reason, message, warning, minor))

    def claim_status(
        self,
        ref: ClaimRef,
        devices: Sequence[DeviceStatus],
        written: Callable[[], None],
        *,
        is_first: bool = False,
    ) -> None:
        """Report the status of a claim's devices. Replaces a status that was not written yet. With `is_first`, the
        recorder does not read the claim.

        The recorder's thread calls `written` when the API server has stored the status.
        """
        self._put(ClaimState(ref, tuple(devices), written, is_first))

    def claim_gone(self, ref: ClaimRef) -> None:
        with self._lock:
            self._queue.withdraw_state(ref)

    def _put(self, report: Report) -> None:
        with self._lock:
            if self._stop_by is not None:
                self.dropped += 1
                return
            gone = self._queue.put(report, self.clock())
            lost = sum(not is_minor(entry) for entry in gone)
            is_first_loss = lost and not self.dropped
            self.dropped += lost
        self.wake()
        if is_first_loss:
            _log.warning(
                "notices_dropped", reason="too many events at once, or the API server does not answer"
            )

    def _turn(self) -> float:
        with self._lock:
            now, stop_by = self.clock(), self._stop_by
            at = self._queue.ready_at(now, hurry=stop_by is not None)
            if stop_by is not None and (at is None or at >= stop_by):
                self.retire()
                return 0.0
            queued = self._queue.take(now, hurry=stop_by is not None)
        if queued is None:
            return math.inf if at is None else at - now
        try:
            self._write(queued)
        except DraDriverError as error:
            if _is_for_now(error):
                self._try_later(queued, error)
            else:
                self._refused(queued, error)
        else:
            self._backoff.reset()
            self._is_down = False
        return 0.0

    def _crashed(self, _error: Exception) -> float:
        self.failed += 1
        return 0.0

    def _write(self, queued: QueuedReport) -> None:
        match queued.report:
            case ClaimEvent() as report:
                self._spread(report, queued)
            case ObjectEvent() as report:
                self.events.write(
                    report.about,
                    report.reason,
                    report.message,
                    warning=report.warning,
                    times=queued.times,
                )
                self.written += 1
            case ClaimState() as report:
                if self.claims.write(report.ref, report.devices, is_first=report.is_first):
                    self.written += 1
                    report.written()

    def _spread(self, report: ClaimEvent, queued: QueuedReport) -> None:
        """Convert an event for a claim into events for single objects, which are retried separately."""
        try:
            pods = tuple(self.claims.pods_of(report.ref))
        except ApiRejectedError as error:
            if _is_for_now(error):
                raise
            pods = ()
            self._refused(queued, error)
        with self._lock:
            for about in reversed((claim_object(report.ref), *pods[:_MAX_PODS])):
                single = ObjectEvent(about, report.reason, report.message, report.warning)
                self._queue.put_first(QueuedReport(single, queued.times, queued.due))

    def _try_later(self, queued: QueuedReport, error: DraDriverError) -> None:
        if isinstance(queued.report, ClaimState):
            # The API server may have stored the status although no response arrived, and the claim may have changed.
            queued = replace(queued, report=replace(queued.report, is_first=False))
        retry_after_s = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
        delay = self._backoff.next(min(retry_after_s or 0.0, _MAX_RETRY_AFTER_S))
        with self._lock:
            now = self.clock()
            self._queue.put_first(queued)
            self._queue.pause(now + delay)
            lost = self._queue.forget_due_before(now - self.limits.give_up_s)
            self.dropped += lost
        if not self._is_down or lost:
            _log.warning("notices_delayed", reason=str(error), dropped=lost, retry_in_s=round(delay, 2))
        self._is_down = True

    def _refused(self, queued: QueuedReport, error: DraDriverError) -> None:
        self.failed += 1
        kind = type(queued.report).__name__  # class names are values in the log
        status = error.status if isinstance(error, ApiRejectedError) else 0
        log = _log.debug if (kind, status) in self._logged else _log.warning
        self._logged.add((kind, status))
        log("notice_refused", notice=kind, reason=str(error))


def _is_for_now(error: DraDriverError) -> bool:
    """Whether all requests fail until the API server is reachable or accepts our token again."""
    return isinstance(error, ApiUnavailableError) or (
        isinstance(error, ApiRejectedError) and error.status == 401
    )
