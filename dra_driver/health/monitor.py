"""Watches the health of the node's GPUs.

    Monitor, one thread ────────────────────────────┐
      ├─ EventListener, one thread                  ├──▶ HealthBook ──▶ publisher, streams, reports
      └─ a GpuPoller for each GPU, one PollThread ──┘         └──▶ one thread that writes the file

The monitor's own thread makes no NVML calls: it creates and drops the pollers, and detects that an operation of the
plugin, a poll, or the wait for events hangs. While a poll takes long, there are as many poll threads as GPUs, so that
every other GPU is still polled.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import structlog

from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError
from dra_driver.health.book import FRESH_S, OVERDUE_S, HealthBook, HealthThread
from dra_driver.health.poller import GpuPoller
from dra_driver.model.dataclass import dataclass
from dra_driver.model.health import (
    UNRESPONSIVE,
    Hanging,
    HealthTarget,
    NoAnswer,
    PolledHealth,
    Reset,
    Severity,
)
from dra_driver.model.problems import NodeProblem

if TYPE_CHECKING:
    from dra_driver.nvml.health_source import HealthSource

_CHECK_EVERY_S = 5.0
_FORGET_AFTER_S = 600.0
_log = structlog.get_logger(__name__)

_LATE_S = 1.0
"""A poll takes milliseconds, unless the GPU hangs or is being initialised."""
_SHORTEST_PAUSE_S = 0.1
"""GPUs that are due at nearly the same time are polled together."""
_WAIT_S = 1.0
"""Also how long discovery may wait before it can reopen NVML."""
_EVENTS_AT_ONCE = 64


@dataclass(eq=False)
class Monitor(HealthThread):
    """A GPU that was removed (pulled, drained, or given to another driver) is forgotten after a while.

        watched ──not in `gpus`──▶ missing ──its place is empty or taken for ten minutes──▶ forgotten
         ▲                          │
         └────────it is back────────┘     a lost GPU that is still on the bus stays lost

    `gpus` returns the PCI bus IDs of the GPUs to watch, by UUID; None while unknown. `hanging` returns the current
    operation on each GPU, by UUID, and its monotonic start. Several threads call both, which must not block.
    """

    book: HealthBook
    source: HealthSource
    gpus: Callable[[], Mapping[str, str | None] | None]
    is_on_bus: Callable[[str], bool]
    hanging: Callable[[], Mapping[str, tuple[str, float]]]
    on_polled: Callable[[str, PolledHealth], None]

    def __post_init__(self) -> None:
        self.monotonic = self.book.monotonic
        # Replaced, never modified, because other threads read it.
        self.pollers: Mapping[str, GpuPoller] = {}
        self.listener = EventListener(self.book, self.source)
        self._poll_threads: list[PollThread] = []
        self._watched_since: Mapping[str, float] = {}  # by the monotonic clock
        self._missing: dict[
            str, float
        ] = {}  # since when a GPU has been missing from the bus, by the monotonic clock
        self._is_started = False
        super().__init__("health", self.turn, _CHECK_EVERY_S)

    def problems(self, names: Mapping[str, str]) -> Iterator[NodeProblem]:
        reported = set()
        for target, state in self.book.states().items():
            texts = [reason.text for reason in state.reasons if reason.key == UNRESPONSIVE]
            if texts:
                uuid, name = target.gpu_uuid, names.get(target.gpu_uuid, target.gpu_uuid)
                reported.add(uuid)
                yield NodeProblem(
                    "gpu-unresponsive", f"{_display_name(name, uuid)}: {'; '.join(texts)}", name
                )
        for uuid in self.gpus() or ():
            name, now = names.get(uuid, uuid), self.monotonic()
            is_new = now - self._watched_since.get(uuid, now) <= FRESH_S
            if uuid not in reported and not is_new and not self.book.is_fresh(uuid):
                yield NodeProblem(
                    "health-unknown",
                    f"the health of {_display_name(name, uuid)} has not been read for {FRESH_S:.0f} s; the GPU may "
                    "need a reset: check the kernel log (dmesg) for Xid errors",
                    name,
                )

    def start(self) -> None:
        self.book.restore()
        self._is_started = True
        self.book.writer.start()
        self.listener.start()
        super().start()

    def stop(self) -> bool:
        self.leave()
        return self.close()

    def leave(self) -> None:
        """Save the states for the next process, and change nothing any more. `close` waits for the threads."""
        for worker in (self, self.listener, *self._poll_threads):
            worker.retire()
        if self.book.writer.stop() and self._is_started:
            self.book.write()

    def close(self) -> bool:
        """Wait for the threads that read NVML; returns whether all have ended. A hanging one is left behind."""
        until = time.monotonic() + self.join_s
        has_ended = self.wait_ended(self.join_s)
        for worker in (self.listener, *self._poll_threads):
            worker.retire()
            has_ended &= worker.wait_ended(max(0.0, until - time.monotonic()))
        if has_ended:
            self.source.close()
        return has_ended

    def devices_changed(self) -> None:
        self.wake()
        self.listener.renew()

    def turn(self) -> float:
        gpus, now = self.gpus(), self.monotonic()
        self._watched_since = {uuid: self._watched_since.get(uuid, now) for uuid in gpus or ()}
        if gpus is None:
            self._missing = {}
        else:
            self.book.places.update((uuid, place) for uuid, place in gpus.items() if place is not None)
            self._forget_gone(gpus)
            self._watch({*gpus, *self._lost()} if gpus else set())
        self._keep_polling()
        self.check_for_hangs()
        return _CHECK_EVERY_S

    def check_for_hangs(self) -> None:
        now = self.monotonic()
        ended = {
            target: (Hanging(),) for target, state in self.book.states().items() if state.has(UNRESPONSIVE)
        }
        hanging = {
            HealthTarget(uuid): (Hanging(what, now - since),)
            for uuid, (what, since) in self.hanging().items()
        }
        self.book.take(ended | hanging)
        gpus = self.gpus() or {}
        opening_s = self.source.change_lasts_s()
        if opening_s >= OVERDUE_S:
            self.book.take({HealthTarget(uuid): (NoAnswer(opening_s),) for uuid in gpus})
        for poller in self.pollers.values():
            if poller.uuid in gpus:
                poller.check_for_hang()
        self.listener.check_for_hang()

    def _lost(self) -> set[str]:
        """Return the lost GPUs, which are watched even if discovery no longer lists them."""
        return {
            target.gpu_uuid for target, state in self.book.states().items() if state.severity == Severity.LOST
        }

    def is_watched(self, gpu_uuid: str) -> bool:
        """Return False if another driver has just taken the GPU."""
        gpus = self.gpus() or {}
        is_lost = self.book.state(HealthTarget(gpu_uuid)).severity == Severity.LOST
        return gpu_uuid in gpus or (is_lost and bool(gpus))

    def _watch(self, gpu_uuids: set[str]) -> None:
        """Create and drop pollers. A poller that hangs stays until its call returns, so that no second call is made."""
        pollers = {}
        for uuid, poller in self.pollers.items():
            poller.is_over |= uuid not in gpu_uuids
            if poller.is_over and not poller.is_busy:
                self.source.forget(uuid)  # not earlier: a call that hangs may use the event set
            else:
                pollers[uuid] = poller
        made = [self._poller(uuid) for uuid in sorted(gpu_uuids - pollers.keys())]
        if not made and len(pollers) == len(self.pollers):
            return
        self.pollers = pollers | {poller.uuid: poller for poller in made}
        self._poll_soon()
        self.listener.watch(self.pollers)

    def _poller(self, uuid: str) -> GpuPoller:
        is_watched = partial(self.is_watched, uuid)
        return GpuPoller(uuid, self.book, self.source, is_watched, self.on_polled, self._poll_soon)

    def _poll_soon(self) -> None:
        for thread in self._poll_threads:
            thread.wake()

    def _keep_polling(self) -> None:
        if not self._is_started or self.is_stopping:
            return
        is_late = any(thread.is_late() for thread in self._poll_threads)
        wanted = max(1, len(self.pollers)) if is_late else 1
        surplus = self._poll_threads[wanted:]
        for thread in surplus:
            thread.retire()
        self._poll_threads = [
            thread for thread in self._poll_threads if not (thread.is_stopping and thread.wait_ended(0.0))
        ]
        if surplus:
            self._poll_soon()  # the others may have skipped a GPU that a surplus thread was polling
        while len(self._poll_threads) < wanted:
            thread = PollThread(self)
            thread.start()
            self._poll_threads.append(thread)
            thread.wake()  # `_poll_soon` may have missed it

    def _forget_gone(self, gpus: Mapping[str, str | None]) -> None:
        known = {target.gpu_uuid for target in self.book.states()}
        gone = {uuid for uuid in known - gpus.keys() if self._is_place_empty(uuid, gpus)}
        now = self.monotonic()
        self._missing = {uuid: self._missing.get(uuid, now) for uuid in gone}
        forgotten = {uuid for uuid, since in self._missing.items() if now - since >= _FORGET_AFTER_S}
        if gpus and self.book.is_new_boot:
            # GPUs with a known place are forgotten once the place has been empty for a while.
            self.book.is_new_boot = False
            forgotten |= {
                uuid for uuid in known - gpus.keys() if self.book.state(HealthTarget(uuid)).pci_bus_id is None
            }
        self.book.forget(forgotten)

    def _is_place_empty(self, uuid: str, gpus: Mapping[str, str | None]) -> bool:
        """Whether the GPU's place on the bus is empty or taken by another GPU.

        False if the place is unknown; a GPU that does not come back is then forgotten after the next reboot.
        """
        place = self.book.state(HealthTarget(uuid)).pci_bus_id
        return place is not None and (place in gpus.values() or not self.is_on_bus(place))


def _display_name(name: str, uuid: str) -> str:
    return f"GPU {uuid}" if name == uuid else f"GPU {name} ({uuid})"


class PollThread(HealthThread):
    """Polls the GPUs that are due, except those that another thread is polling."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._polling_since: float | None = None
        # After an error, the next turn polls the GPUs that come after this one.
        super().__init__("health-polls", self.turn, _SHORTEST_PAUSE_S)

    def is_late(self) -> bool:
        since = self._polling_since
        return since is not None and time.monotonic() - since >= _LATE_S

    def turn(self) -> float:
        pause_s = math.inf
        try:
            for poller in self._monitor.pollers.values():
                if self.is_stopping:
                    break
                self._polling_since = time.monotonic()
                pause_s = min(pause_s, poller.turn())
        finally:
            self._polling_since = None
        return max(_SHORTEST_PAUSE_S, pause_s)


class EventListener(HealthThread):
    def __init__(self, book: HealthBook, source: HealthSource) -> None:
        self._book, self._source = book, source
        self._pollers: Mapping[str, GpuPoller] = {}
        self._refresh = threading.Event()
        self._driver_loads = 0
        self._calling_since: float | None = None
        self._logged = ""
        super().__init__("health-events", lambda: self.turn(_WAIT_S), _WAIT_S)

    def watch(self, pollers: Mapping[str, GpuPoller]) -> None:
        self._pollers = pollers
        self.wake()

    def renew(self) -> None:
        self._refresh.set()
        self.wake()

    def check_for_hang(self) -> None:
        """Record a call that does not return. Makes no NVML calls."""
        since = self._calling_since
        if since is not None and self._book.monotonic() - since >= OVERDUE_S:
            self._set_events_problem(f"NVML's wait for events has not returned for {OVERDUE_S:.0f} s")

    def turn(self, wait_s: float) -> float:
        pollers = self._pollers
        if not pollers:
            return math.inf  # `watch` wakes the thread
        try:
            self._open(pollers.values())
            return self._receive(pollers, wait_s)
        except NvmlUnavailableError:
            pass  # the pollers log this error
        except DraDriverError as error:
            self._failed(str(error))
        finally:
            self._calling_since = None
        return wait_s

    def _open(self, pollers: Iterable[GpuPoller]) -> None:
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

    def _receive(self, pollers: Mapping[str, GpuPoller], wait_s: float) -> float:
        wait = wait_s
        for _ in range(_EVENTS_AT_ONCE):
            self._calling_since = self._book.monotonic()
            try:
                event = self._source.wait(wait)
            except DeviceLostError:
                _poll_all(pollers)
                return wait_s
            self._set_events_problem(None)
            if event is None:
                break
            wait = 0.0
            poller = pollers.get(event.gpu_uuid or "")
            if poller is None:
                self._book.warn_of_unknown(event)
                _poll_all(pollers)
            else:
                poller.on_event(event)
        return 0.0

    def _failed(self, reason: str) -> None:
        self._refresh.set()
        if reason != self._logged:
            self._logged = reason
            _log.warning("gpu_events_failed", reason=reason)
        self._set_events_problem(reason)

    def _set_events_problem(self, problem: str | None) -> None:
        for poller in self._pollers.values():
            poller.set_events_problem(problem)


def _poll_all(pollers: Mapping[str, GpuPoller]) -> None:
    for poller in pollers.values():
        poller.poll_soon()
