"""Tells users through the API server what happened to their claims and to this node, in a thread of its own.

Whoever has something to say never waits and never meets an error: what cannot be said is counted and dropped.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, DraDriverError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.notices import DeviceStatus, EventObject, claim_object, node_object
from dra_driver.services.outbox import (
    ClaimEvent,
    ClaimState,
    Notice,
    ObjectEvent,
    Outbox,
    Pace,
    Waiting,
    is_minor,
)

_log = structlog.get_logger(__name__)
_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security

_REQUEST_S: Final = 5.0
_FLUSH_S: Final = 2.0
_MOST_PODS = 16
_LONGEST_ASKED_S = 120.0


class Events(Protocol):
    """The API server's events."""

    def write(
        self,
        about: EventObject,
        reason: str,
        message: str,
        *,
        warning: bool,
        times: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        """Create the event, or count it up. Raises: ApiUnavailableError, ApiRejectedError."""


class Claims(Protocol):
    """The claims in the API server. Raises: ApiUnavailableError, ApiRejectedError."""

    def pods_of(self, ref: ClaimRef, *, timeout_s: float | None = None) -> Sequence[EventObject]:
        """The pods that use a claim."""

    def write(
        self, ref: ClaimRef, devices: Sequence[DeviceStatus], *, timeout_s: float | None = None
    ) -> bool:
        """Write the state of our devices into the claim; False if nothing had to be written."""


class Announcer:
    """A bounded queue and the thread that empties it. Every method may be called from any thread.

    `dropped` counts notices that nobody will see: the queue was full, or the API server was away for minutes.
    `skipped` counts the minor ones for which there was no room, which is nothing to worry about. `failed` counts
    those that it refused, `written` the events and claim states that it took.
    """

    def __init__(
        self,
        node: str,
        events: Events,
        claims: Claims,
        *,
        pace: Pace = Pace(),  # noqa: B008  frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._events = events
        self._claims = claims
        self._pace = pace
        self._clock = clock
        self._outbox = Outbox(pace)
        self._changed = threading.Condition()
        self._stop_by: float | None = None
        self._backoff_s = pace.backoff_first_s
        self._is_down = False
        self._told: set[tuple[str, int]] = set()
        self.dropped = 0
        self.skipped = 0
        self.written = 0
        self.failed = 0
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        """Begin to speak; what was given before is said now."""
        self._thread.start()

    def stop(self) -> None:
        """Say what can be said within two seconds, drop the rest."""
        with self._changed:
            if self._stop_by is not None:
                return
            self._stop_by = self._clock() + _FLUSH_S
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_FLUSH_S)
        with self._changed:
            self.dropped += len(self._outbox)
            self._outbox = Outbox(self._pace)

    def claim_event(self, ref: ClaimRef, reason: str, message: str, *, warning: bool) -> None:
        """An event for a claim and for the pods that use it; the same one at most once a minute."""
        self._put(ClaimEvent(ref, reason, message, warning))

    def minor_claim_event(self, ref: ClaimRef, reason: str, message: str) -> None:
        """An event for a claim alone, that everything else goes before and that may be left out."""
        self._put(ObjectEvent(claim_object(ref), reason, message, warning=False, minor=True))

    def node_event(self, reason: str, message: str, *, warning: bool, minor: bool = False) -> None:
        """An event for this node; the same one at most once a minute. A `minor` one may be left out."""
        self._put(ObjectEvent(node_object(self._node), reason, message, warning, minor))

    def claim_status(
        self, ref: ClaimRef, devices: Sequence[DeviceStatus], written: Callable[[], None]
    ) -> None:
        """The state of all devices that this driver has in a claim; one that was not written yet is replaced.

        `written` is called from the announcer's thread once that was written, and never if it was lost or
        nothing had to be written.
        """
        self._put(ClaimState(ref, tuple(devices), written))

    def claim_gone(self, ref: ClaimRef) -> None:
        """The claim holds nothing of ours any more; a state that was not written yet is of no use to anybody."""
        with self._changed:
            self._outbox.withdraw_state(ref)

    def _put(self, notice: Notice) -> None:
        with self._changed:
            if self._stop_by is not None:
                self.dropped += 1
                return
            gone = self._outbox.put(notice, self._clock())
            self._changed.notify_all()
            lost = sum(not is_minor(entry) for entry in gone)
            tell = lost and not self.dropped
            self.dropped += lost
            self.skipped += len(gone) - lost
        if tell:
            _log.warning("notices_dropped", reason="too much happens at once, or the API server is away")

    def _run(self) -> None:
        while (waiting := self._next()) is not None:
            try:
                self._say(waiting)
            except ApiUnavailableError as error:
                self._try_later(waiting, error)
            except DraDriverError as error:
                self._refused(waiting, error)
            except Exception:  # noqa: BLE001  a dead thread would say nothing any more
                _log.exception("notice_failed")
                self._count_failed()
            else:
                self._backoff_s, self._is_down = self._pace.backoff_first_s, False

    def _next(self) -> Waiting | None:
        """The next notice to say, once it may be said; None at the end."""
        with self._changed:
            while True:
                now, stop_by = self._clock(), self._stop_by
                stopping = stop_by is not None
                at = self._outbox.ready_at(now, hurry=stopping)
                if stop_by is not None and (at is None or at >= stop_by):
                    return None
                waiting = self._outbox.take(now, hurry=stopping)
                if waiting is not None:
                    return waiting
                self._changed.wait(None if at is None else at - now)

    def _say(self, waiting: Waiting) -> None:
        match waiting.notice:
            case ClaimEvent() as notice:
                self._spread(notice, waiting)
            case ObjectEvent() as notice:
                self._events.write(
                    notice.about,
                    notice.reason,
                    notice.message,
                    warning=notice.warning,
                    times=waiting.times,
                    timeout_s=_REQUEST_S,
                )
                self._count_written()
            case ClaimState() as notice:
                if self._claims.write(notice.ref, notice.devices, timeout_s=_REQUEST_S):
                    self._count_written()
                    notice.written()

    def _spread(self, notice: ClaimEvent, waiting: Waiting) -> None:
        """From an event for a claim to one for each object: each is said, and tried again, for itself."""
        try:
            pods = tuple(self._claims.pods_of(notice.ref, timeout_s=_REQUEST_S))
        except ApiRejectedError as error:
            pods = ()
            self._refused(waiting, error)
        with self._changed:
            for about in reversed((claim_object(notice.ref), *pods[:_MOST_PODS])):
                single = ObjectEvent(about, notice.reason, notice.message, notice.warning)
                self._outbox.put_first(Waiting(single, waiting.times, waiting.due))

    def _try_later(self, waiting: Waiting, error: ApiUnavailableError) -> None:
        asked = min(error.retry_after_s or 0.0, _LONGEST_ASKED_S)
        delay = max(self._backoff_s * _jitter.uniform(0.8, 1.2), asked * _jitter.uniform(1.0, 1.2))
        self._backoff_s = min(self._backoff_s * 2, self._pace.backoff_most_s)
        with self._changed:
            now = self._clock()
            self._outbox.put_first(waiting)
            self._outbox.pause(now + delay)
            lost = self._outbox.forget_due_before(now - self._pace.give_up_s)
            self.dropped += lost
        if not self._is_down or lost:
            _log.warning("notices_delayed", reason=str(error), dropped=lost, retry_in_s=round(delay, 2))
        self._is_down = True

    def _refused(self, waiting: Waiting, error: DraDriverError) -> None:
        self._count_failed()
        kind = type(waiting.notice).__name__
        status = error.status if isinstance(error, ApiRejectedError) else 0
        tell = _log.debug if (kind, status) in self._told else _log.warning
        self._told.add((kind, status))
        tell("notice_refused", notice=kind, reason=str(error))

    def _count_written(self) -> None:
        with self._changed:
            self.written += 1

    def _count_failed(self) -> None:
        with self._changed:
            self.failed += 1
