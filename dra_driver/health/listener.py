"""The thread that waits for NVML's events of all GPUs. It makes no call that is about one GPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError
from dra_driver.health.book import OVERDUE_S, HealthBook, HealthThread
from dra_driver.health.poller import GpuPoller
from dra_driver.model.health import Reset

if TYPE_CHECKING:
    from dra_driver.nvml.events import HealthSource

_log = structlog.get_logger(__name__)

_WAIT_S = 1.0
"""Also how long discovery waits at most before it can open NVML again."""
_EVENTS_AT_ONCE = 64


class EventListener(HealthThread):
    """Passes each event on to the thread of its GPU. `pollers` returns these by UUID."""

    def __init__(
        self, source: HealthSource, book: HealthBook, pollers: Callable[[], Mapping[str, GpuPoller]]
    ) -> None:
        self._source, self._book, self._pollers = source, book, pollers
        self._refresh = threading.Event()
        self._driver_loads = 0
        self._calling_since: float | None = None
        self._logged = ""
        super().__init__("health-events", lambda: self.turn(_WAIT_S), _WAIT_S)

    def renew(self) -> None:
        """GPUs, MIG devices or MIG modes are others than before: have every GPU registered again and polled."""
        self._refresh.set()
        self.wake()

    def look_for_hang(self) -> None:
        """Take in that a call does not return. Called by another thread; it calls no NVML."""
        since = self._calling_since
        if since is not None and self._book.monotonic() - since >= OVERDUE_S:
            self._be_deaf(f"NVML's wait for events has not returned for {OVERDUE_S:.0f} s")

    def turn(self, wait_s: float) -> float:
        """Wait for events, and pass them on. Returns how long to pause before the next turn."""
        pollers = self._pollers()
        if not pollers:
            return math.inf  # `renew` wakes it when there are GPUs
        try:
            self._open(pollers.values())
            return self._hear(pollers, wait_s)
        except NvmlUnavailableError:
            pass  # the pollers log it
        except DraDriverError as error:
            self._failed(str(error))
        finally:
            self._calling_since = None
        return wait_s

    def _open(self, pollers: Iterable[GpuPoller]) -> None:
        """Raises: NvmlUnavailableError, RetryableError."""
        if not self._refresh.is_set() and self._source.set_number() is not None:
            return
        self._refresh.clear()
        self._calling_since = self._book.monotonic()
        try:
            version = self._source.driver_version()
            self._source.open_events()
        except DraDriverError:
            self._refresh.set()
            raise
        known = self._book.driver_version
        if self._source.driver_loads != self._driver_loads or (
            None not in (known, version) and known != version
        ):
            self._book.take({target: (Reset(),) for target in self._book.states()})
        self._driver_loads, self._book.driver_version = self._source.driver_loads, version or known
        for poller in pollers:
            poller.poll_soon()

    def _hear(self, pollers: Mapping[str, GpuPoller], wait_s: float) -> float:
        """Raises: NvmlUnavailableError, RetryableError."""
        wait = wait_s
        for _ in range(_EVENTS_AT_ONCE):
            self._calling_since = self._book.monotonic()
            try:
                event = self._source.wait(wait)
            except DeviceLostError:
                _poll_all(pollers)
                return wait_s
            self._be_deaf(None)
            if event is None:
                break
            wait = 0.0
            poller = pollers.get(event.gpu_uuid or "")
            if poller is None:
                self._book.warn_of_unknown(event)
                _poll_all(pollers)
            else:
                poller.hear(event)
        return 0.0

    def _failed(self, reason: str) -> None:
        self._refresh.set()
        if reason != self._logged:
            self._logged = reason
            _log.warning("gpu_events_failed", reason=reason)
        self._be_deaf(reason)

    def _be_deaf(self, problem: str | None) -> None:
        for poller in self._pollers().values():
            poller.be_deaf(problem)


def _poll_all(pollers: Mapping[str, GpuPoller]) -> None:
    for poller in pollers.values():
        poller.poll_soon()
