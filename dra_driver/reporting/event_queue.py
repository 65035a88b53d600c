"""What is still to be reported to users: bounded, equal reports merged, and no faster than the API server likes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from dra_driver.base.backoff import TokenBucket
from dra_driver.model.claim import ClaimRef, DeviceStatus
from dra_driver.model.problems import EventObject

_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """How much is reported, and how soon. Times in seconds; at most `most` reports wait.

    The same event is reported again only after `again_s`, with the number of times it happened until then. A claim's
    state is reported after `settle_s`, so that the kubelet's other calls of that moment are answered first.
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
    """An event for a claim and the pods that use it."""

    ref: ClaimRef
    reason: str
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """An event for one object. A `minor` one is reported after all others, and dropped before them."""

    about: EventObject
    reason: str
    message: str
    warning: bool
    minor: bool = False


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The state of all devices of ours in a claim; only the newest matters.

    `written` is called once the API server has stored it. `is_first` says that Prepare read the claim just before, and
    its status had no device.
    """

    ref: ClaimRef
    devices: tuple[DeviceStatus, ...]
    written: Callable[[], None] = field(compare=False)
    is_first: bool = field(default=False, compare=False)


Report = ClaimEvent | ObjectEvent | ClaimState


@dataclass(slots=True)
class QueuedReport:
    """A report, how often it was given since it was last sent, and when it is due."""

    report: Report
    times: int
    due: float


class EventQueue:
    """Reports in order of arrival. Moments are seconds of a monotonic clock. Its owner locks."""

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
        """Add a report. Answers those that are dropped for it: minor events first, claim states last, oldest first."""
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
        """Forget the state of a claim that was not sent yet."""
        self._queued.pop(ref, None)

    def put_first(self, queued: QueuedReport) -> None:
        """Add what comes of a report that was taken, or that report itself again; the bound does not count."""
        key = _key(queued.report)
        newer = self._queued.get(key)
        if newer is not None:
            newer.times += queued.times
            newer.due = min(newer.due, queued.due)
        else:
            self._queued[key] = queued
        self._queued.move_to_end(key, last=False)

    def take(self, now: float, *, hurry: bool = False) -> QueuedReport | None:
        """The first report that may be sent now, a minor one only if there is no other. With `hurry`, none is held back
        because the same one was sent lately."""
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
        """When `take` has something; None if the queue is empty."""
        moments = (self._ready_at(queued, now, hurry=hurry) for queued in self._queued.values())
        return min(moments, default=None)

    def pause(self, until: float) -> None:
        """Hold everything back until that moment."""
        self._paused_until = until

    def forget_due_before(self, moment: float) -> int:
        """Drop the events that were due before `moment`; how many. A claim's state is never too old."""
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
    """Whether the report may be left out when there are too many."""
    return isinstance(report, ObjectEvent) and report.minor


def _weight(report: Report) -> int:
    """Which report is dropped first: the lightest."""
    if isinstance(report, ClaimState):
        return 2
    return 0 if is_minor(report) else 1


def _key(report: Report) -> Hashable:
    return report.ref if isinstance(report, ClaimState) else report
