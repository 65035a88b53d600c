"""Faults that a test or the demo switches on while the server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Failure:
    """What to answer so many requests instead of serving them; `body` None means an ordinary Status object."""

    left: int
    status: int
    reason: str
    path: str
    method: str
    retry_after: str | None
    body: bytes | None


class Faults:
    """All switches of one server; every method may be called from any thread.

    `down = True` drops every connection without an answer; for a refused connection stop the server.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.down = False
        self._wake = wake  # lets open watches notice that they are cut
        self._lock = threading.Lock()
        self._slow: dict[str, float] = {}
        self._drips: dict[str, float] = {}
        self._failures: list[Failure] = []
        self.cuts = 0
        """How often watches were cut; a watch ends when this differs from its start."""
        self.silenced = 0
        """How often open connections were silenced; one that is from before that answers nothing."""
        self.watch_events: list[dict[str, Any]] | None = None
        """All events of a new watch before it ends; None for a normal watch."""

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
        """Answer the next `count` requests whose path and query contain `path` (and with `method`) with `status`."""
        with self._lock:
            self._failures.append(Failure(count, status, reason, path, method, retry_after, body))

    def slow(self, path: str, seconds: float) -> None:
        """Delays responses to paths that contain `path`; 0 ends it."""
        with self._lock:
            self._slow[path] = seconds

    def drip(self, path: str, pause_s: float) -> None:
        """Responds to paths that contain `path` byte by byte, with a pause before each; 0 ends it."""
        with self._lock:
            self._drips[path] = pause_s

    def cut_watches(self) -> None:
        """Break all watches now open in the middle, without the closing chunk."""
        with self._lock:
            self.cuts += 1
        self._wake()

    def silence_connections(self) -> None:
        """Stops responding on the currently open connections; new ones work.

        This simulates a load balancer that keeps connections although the server behind it is gone.
        """
        with self._lock:
            self.silenced += 1

    def end_watches(self, *events: dict[str, Any]) -> None:
        """Responds to each new watch with 200, these raw events and a regular end, at once."""
        self.watch_events = [*events]

    def clear(self) -> None:
        """Back to health; open watches stay as they are."""
        with self._lock:
            self.down = False
            self.watch_events = None
            self._slow.clear()
            self._drips.clear()
            self._failures.clear()

    def delay_of(self, path: str) -> float:
        """Seconds to hold back an answer."""
        with self._lock:
            return max((seconds for part, seconds in self._slow.items() if part in path), default=0.0)

    def drip_of(self, path: str) -> float:
        """Seconds before each byte of an answer."""
        with self._lock:
            return max((pause_s for part, pause_s in self._drips.items() if part in path), default=0.0)

    def answer_of(self, method: str, path: str) -> Failure | None:
        """The failure that this request meets, counted down; None if it is to be served."""
        with self._lock:
            for failure in self._failures:
                if failure.left and failure.path in path and failure.method in ("", method):
                    failure.left -= 1
                    return failure
        return None
