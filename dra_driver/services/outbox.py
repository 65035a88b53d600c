"""What is still to be said to users: bounded, equal notices merged, and at a pace that no API server minds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from dra_driver.model.claim import ClaimRef
from dra_driver.model.notices import DeviceStatus, EventObject

_ROUNDING = 1e-9
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is said, and how soon. Times in seconds; `most` notices wait at a time.

    The same event is said again only after `again_s`, with the number of times it happened until then. A claim's state
    is said after `settle_s`: calls of the kubelet that came with the one that made it are answered first.
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


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    """An event for a claim and the pods that use it."""

    ref: ClaimRef
    reason: str
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """An event for one object. A `minor` one is said after all others, and dropped before them."""

    about: EventObject
    reason: str
    message: str
    warning: bool
    minor: bool = False


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The state of all devices that this driver has in a claim; only the newest matters.

    `written` is called once that was written.
    """

    ref: ClaimRef
    devices: tuple[DeviceStatus, ...]
    written: Callable[[], None] = field(default=_nothing, compare=False)


Notice = ClaimEvent | ObjectEvent | ClaimState


@dataclass(slots=True)
class Waiting:
    """A notice, how often it was given since it was last said, and when it is due."""

    notice: Notice
    times: int
    due: float


class Outbox:
    """Notices in order of arrival. Moments are seconds of a monotonic clock. Its owner locks."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._waiting: OrderedDict[Hashable, Waiting] = OrderedDict()
        self._said: OrderedDict[Hashable, float] = OrderedDict()
        self._events = _Bucket(pace.events_per_s, pace.events_at_once)
        self._statuses = _Bucket(pace.statuses_per_s, pace.statuses_at_once)
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, notice: Notice, now: float) -> list[Notice]:
        """Add a notice; the ones that had to go for it: minor events first, claim states last, the oldest of each."""
        key = _key(notice)
        known = self._waiting.get(key)
        if known is not None:
            known.notice = notice
            known.times += 1
            return []
        self._waiting[key] = Waiting(notice, 1, self._due(key, now))
        gone: list[Notice] = []
        while len(self._waiting) > self._pace.most:
            least = min(self._waiting, key=lambda key: _weight(self._waiting[key].notice))
            gone.append(self._waiting.pop(least).notice)
        return gone

    def _due(self, key: Hashable, now: float) -> float:
        if isinstance(key, ClaimRef):
            return now + self._pace.settle_s
        said = self._said.get(key)
        return now if said is None else max(now, said + self._pace.again_s)

    def withdraw_state(self, ref: ClaimRef) -> None:
        """Forget the state of a claim that was not said yet."""
        self._waiting.pop(ref, None)

    def put_first(self, waiting: Waiting) -> None:
        """Add what comes of a notice that was taken, or that notice itself again; the bound does not count."""
        key = _key(waiting.notice)
        newer = self._waiting.get(key)
        if newer is not None:
            newer.times += waiting.times
            newer.due = min(newer.due, waiting.due)
        else:
            self._waiting[key] = waiting
        self._waiting.move_to_end(key, last=False)

    def take(self, now: float, *, hurry: bool = False) -> Waiting | None:
        """The first notice that may be said now, a minor one only if there is no other; with `hurry` none is held back
        for having been said lately."""
        ready = (entry for entry in self._waiting.values() if self._ready_at(entry, now, hurry=hurry) <= now)
        waiting = min(ready, key=lambda entry: is_minor(entry.notice), default=None)
        if waiting is None:
            return None
        key = _key(waiting.notice)
        del self._waiting[key]
        self._bucket(waiting).take(now)
        if not isinstance(waiting.notice, ClaimState):
            self._said.pop(key, None)
            self._said[key] = now
            if len(self._said) > _REMEMBERED:
                self._said.popitem(last=False)
        return waiting

    def ready_at(self, now: float, *, hurry: bool = False) -> float | None:
        """When `take` has something; None if nothing waits."""
        moments = (self._ready_at(waiting, now, hurry=hurry) for waiting in self._waiting.values())
        return min(moments, default=None)

    def pause(self, until: float) -> None:
        """Let nothing be taken before."""
        self._paused_until = until

    def forget_due_before(self, moment: float) -> int:
        """Drop the events that should have been said before `moment`; how many. What a claim's state is does not
        become old."""
        old = [
            key
            for key, waiting in self._waiting.items()
            if waiting.due < moment and not isinstance(waiting.notice, ClaimState)
        ]
        for key in old:
            del self._waiting[key]
        return len(old)

    def _ready_at(self, waiting: Waiting, now: float, *, hurry: bool) -> float:
        due = now if hurry else waiting.due
        return max(due, self._paused_until, self._bucket(waiting).ready_at(now))

    def _bucket(self, waiting: Waiting) -> _Bucket:
        return self._statuses if isinstance(waiting.notice, ClaimState) else self._events


class _Bucket:
    """`most` tokens at once, then `per_s` a second; nobody waits inside."""

    def __init__(self, per_s: float, most: int) -> None:
        self._per_s = per_s
        self._most = float(most)
        self._tokens = self._most
        self._filled_at: float | None = None

    def ready_at(self, now: float) -> float:
        """When the next token is there."""
        tokens = self._filled(now)
        return now if tokens >= 1 - _ROUNDING else now + (1 - tokens) / self._per_s

    def take(self, now: float) -> None:
        """Use a token."""
        self._tokens, self._filled_at = self._filled(now) - 1, now

    def _filled(self, now: float) -> float:
        passed = 0.0 if self._filled_at is None else max(0.0, now - self._filled_at)
        return min(self._most, self._tokens + passed * self._per_s)


def is_minor(notice: Notice) -> bool:
    """Whether nobody needs the notice where there are too many."""
    return isinstance(notice, ObjectEvent) and notice.minor


def _weight(notice: Notice) -> int:
    """What is lightest goes first."""
    if isinstance(notice, ClaimState):
        return 2
    return 0 if is_minor(notice) else 1


def _key(notice: Notice) -> Hashable:
    return notice.ref if isinstance(notice, ClaimState) else notice
