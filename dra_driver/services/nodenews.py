"""Telling of trouble that concerns the node as a whole: slices that are not published, a driver that went away.

What passes by itself within a moment is not told; each trouble is told once, and once that it is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from dra_driver.model.notices import (
    DEVICE_NOT_PUBLISHED,
    DRIVER_AVAILABLE,
    DRIVER_UNAVAILABLE,
    SLICE_FIELDS_DROPPED,
    SLICES_CONTESTED,
    SLICES_NOT_PUBLISHED,
    SLICES_PUBLISHED,
)

_PATIENCE_S = 30.0


class Announcer(Protocol):
    """The queue of what users get to see; never waits, never raises."""

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        """An event for this node."""


class PublishCounters(Protocol):
    """Metrics of publishing."""

    def published(self, lag_s: float) -> None:
        """Slices were written."""

    def publish_failed(self, error: Exception) -> None:
        """Slices could not be brought up to date."""


class NodeNews:
    """Observes the publisher and discovery. Each method is called from one thread.

    While `may_tell` says no, another instance of the plugin tells of this node.
    """

    def __init__(
        self,
        counters: PublishCounters,
        announcer: Announcer,
        clock: Callable[[], float] = time.monotonic,
        may_tell: Callable[[], bool] = lambda: True,
    ) -> None:
        self._counters = counters
        self._announcer = announcer
        self._may_tell = may_tell
        self._clock = clock
        self._failing_since: float | None = None
        self._is_failure_told = False
        self._lock = threading.Lock()
        self._had_driver = False
        self._driver_problem: str | None = None

    def published(self, lag_s: float) -> None:
        """Slices were written."""
        self._counters.published(lag_s)
        self._failing_since = None
        if self._is_failure_told:
            self._is_failure_told = False
            self._tell(SLICES_PUBLISHED, "the node's slices are published again", warning=False)

    def publish_failed(self, error: Exception) -> None:
        """Slices could not be brought up to date; it is tried again."""
        self._counters.publish_failed(error)
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if not self._is_failure_told and now - self._failing_since >= _PATIENCE_S:
            text = f"the node's slices are not what they should be: {error}; it is tried again"
            self._is_failure_told = self._tell(SLICES_NOT_PUBLISHED, text, warning=True)

    def contested(self, reason: str) -> None:
        """Somebody else changes our slices again and again."""
        self._tell(SLICES_CONTESTED, reason, warning=True)

    def refused(self, fault: str) -> None:
        """A device is left out of the slices, because the API server would refuse it."""
        self._tell(DEVICE_NOT_PUBLISHED, fault, warning=True)

    def dropped(self, gates: str) -> None:
        """The API server dropped fields of a slice."""
        text = f"the API server drops fields of the node's slices; enable its feature gates: {gates}"
        self._tell(SLICE_FIELDS_DROPPED, text, warning=True)

    def driver(self, problem: str | None) -> None:
        """Whether GPUs can be used; `problem` is why not. A driver that was never there is no news."""
        with self._lock:
            before, self._driver_problem = self._driver_problem, problem
            had, self._had_driver = self._had_driver, self._had_driver or problem is None
        if problem is not None and before is None and had:
            text = f"the node's GPUs cannot be used: {problem}"
            self._tell(DRIVER_UNAVAILABLE, text, warning=True)
        elif problem is None and before is not None and had:
            self._tell(DRIVER_AVAILABLE, "the node's GPUs can be used again", warning=False)

    def _tell(self, reason: str, text: str, *, warning: bool) -> bool:
        """Whether it was for us to tell."""
        is_ours = self._may_tell()
        if is_ours:
            self._announcer.node_event(reason, text, warning=warning)
        return is_ours
