"""Faults that a test can inject while the server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Failure:
    """The response to the next `left` requests that match. If `body` is None, it is an ordinary Status object."""

    left: int
    status: int
    reason: str
    path: str
    method: str
    retry_after: str | None
    body: bytes | None


class Faults:
    """The injected faults of one server. Every method can be called from any thread.

    `down = True` drops every connection without a response. To make it refuse connections, stop the server.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.down = False
        self._wake = wake  # makes open watches notice that they are cut
        self._lock = threading.Lock()
        self._slow: dict[str, float] = {}
        self._drips: dict[str, float] = {}
        self._failures: list[Failure] = []
        self.cuts = 0
        """How often watches were cut. A watch ends when this number changes."""
        self.silenced = 0
        """How often open connections were silenced. A connection stops responding when this number changes."""
        self.watch_events: list[dict[str, Any]] | None = None
        """The events that each new watch gets before it ends; None for normal watches."""

    def fail(
        self,
        count: int,
        status: int,
        *,
        reason: str = "InternalError",
        path: str = "",
        method: str = "",
        retry_after: str | None = None,
        body: bytes | None = None,
    ) -> None:
        """Respond with `status` to the next `count` requests with `method` (any if empty) and `path` in their URL."""
        with self._lock:
            self._failures.append(Failure(count, status, reason, path, method, retry_after, body))

    def slow(self, path: str, seconds: float) -> None:
        """Delay responses to paths that contain `path`; 0 ends the delay."""
        with self._lock:
            self._slow[path] = seconds

    def drip(self, path: str, pause_s: float) -> None:
        """Send responses to paths that contain `path` byte by byte, with a pause before each byte; 0 ends this."""
        with self._lock:
            self._drips[path] = pause_s

    def cut_watches(self) -> None:
        """Break all open watches, without the final chunk."""
        with self._lock:
            self.cuts += 1
        self._wake()

    def silence_connections(self) -> None:
        """Stop responding on the currently open connections; new connections work.

        This simulates a load balancer that keeps connections open although the server behind it is gone.
        """
        with self._lock:
            self.silenced += 1

    def end_watches(self, *events: dict[str, Any]) -> None:
        """Respond to each new watch with 200 and these raw events, then end the watch normally."""
        self.watch_events = [*events]

    def clear(self) -> None:
        """Remove all faults. Open watches do not change."""
        with self._lock:
            self.down = False
            self.watch_events = None
            self._slow.clear()
            self._drips.clear()
            self._failures.clear()

    def delay_of(self, path: str) -> float:
        """Return how many seconds to delay the response to this path."""
        with self._lock:
            return max((seconds for part, seconds in self._slow.items() if part in path), default=0.0)

    def drip_of(self, path: str) -> float:
        """Return how many seconds to pause before each byte of the response to this path."""
        with self._lock:
            return max((pause_s for part, pause_s in self._drips.items() if part in path), default=0.0)

    def answer_of(self, method: str, path: str) -> Failure | None:
        """Return the injected failure for this request, and count it down; None if the request is served normally."""
        with self._lock:
            for failure in self._failures:
                if failure.left and failure.path in path and failure.method in ("", method):
                    failure.left -= 1
                    return failure
        return None
