"""Watches one GPU: registers for its events, reads its MIG devices and polls its health.

At most one thread at a time makes NVML calls for a GPU, and `health/monitor.py` replaces a thread whose call hangs.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError
from dra_driver.health.book import OVERDUE_S, HealthBook
from dra_driver.health.rules.polling import compared
from dra_driver.health.rules.state import shows_reset
from dra_driver.health.rules.xids import RECOVERY_ACTION_CHANGED, severity_of_xid
from dra_driver.model.dataclass import replace
from dra_driver.model.health import (
    HealthEvent,
    HealthTarget,
    InstanceSeen,
    MonitoringState,
    NoAnswer,
    Observation,
    PolledHealth,
    PollResult,
    Reset,
    Severity,
    Unreachable,
    Xid,
    identity_of,
)

if TYPE_CHECKING:
    from dra_driver.nvml.health_source import HealthSource

_log = structlog.get_logger(__name__)

_POLL_EVERY_S = 10.0
_RARE_EVERY_S = 50.0
"""How often rarely changing values are queried, except in the first poll, after an event, and while the GPU should get
no new work or a query fails. The documentation promises that faults show within a minute.
"""
_MAX_EVENTS = 256
_NOT_FOUND = PolledHealth(failed=frozenset({"handle"}), answered=False)


class GpuPoller:
    """Watches one GPU until `is_over` is set. `on_due` is called when a turn is due at once."""

    def __init__(
        self,
        uuid: str,
        book: HealthBook,
        source: HealthSource,
        is_watched: Callable[[], bool],
        on_polled: Callable[[str, PolledHealth], None],
        on_due: Callable[[], None],
    ) -> None:
        self.uuid = uuid
        self.is_over = False
        self._target = HealthTarget(uuid)
        self._book, self._source = book, source
        self._is_watched, self._on_polled, self._on_due = is_watched, on_polled, on_due
        self._turn = threading.Lock()
        self._due = self._rare_due = 0.0
        self._rare: PolledHealth | None = None
        self._calling_since: float | None = None
        self._events: deque[HealthEvent] = deque(maxlen=_MAX_EVENTS)
        self._set_number: int | None = None
        self._reports_action = False
        self._registration_problem: str | None = None
        self._events_problem: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._turn.locked()

    def poll_soon(self) -> None:
        self._due = self._rare_due = 0.0
        self._on_due()

    def turn(self) -> float:
        """Return the seconds until the next turn; math.inf if another thread polls the GPU."""
        if self.is_over or not self._turn.acquire(blocking=False):
            return math.inf
        try:
            now = self._book.monotonic()
            if now >= self._due:
                self._due = now + _POLL_EVERY_S
                self._watch(now)
            return max(0.0, self._due - self._book.monotonic())
        finally:
            self._turn.release()

    def _watch(self, now: float) -> None:
        if self.is_over or not self._is_watched():
            return
        self._calling_since = now
        try:
            self._register()
            self._take_events()
            self._poll()
        except NvmlUnavailableError as error:
            _log.debug("health_not_read", gpu_uuid=self.uuid, reason=str(error))
        finally:
            self._calling_since = None

    def check_for_hang(self) -> None:
        """Record a turn that does not end. Makes no NVML calls."""
        since = self._calling_since
        if since is None:
            return
        lasted = self._book.monotonic() - since
        if lasted < OVERDUE_S:
            return
        self._book.take({self._target: (NoAnswer(lasted),)})
        # The affected instances can only be read when the call returns.
        while self._events:
            self._take_event(
                replace(self._events.popleft(), gpu_instance_id=None, compute_instance_id=None), {}
            )

    def on_event(self, event: HealthEvent) -> None:
        """Record an event, in the event thread. Makes no NVML calls."""
        if event.gpu_instance_id is not None:
            self._events.append(event)
            self.poll_soon()
        elif self._take_event(event, {}):
            self.poll_soon()

    def set_events_problem(self, problem: str | None) -> None:
        if problem != self._events_problem:
            self._events_problem = problem
            self._take_monitored()

    def _register(self) -> None:
        number = self._source.set_number()
        if number is None or number == self._set_number:
            return
        try:
            self._source.register(self.uuid, self._place)
            self._registration_problem = None
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            self._registration_problem = str(error)
        self._set_number = number
        self._take_monitored()

    @property
    def _place(self) -> str | None:
        return self._book.places.get(self.uuid) or self._book.state(self._target).pci_bus_id

    def _take_monitored(self) -> None:
        problem = self._events_problem or self._registration_problem
        text = None if problem is None else f"NVML sends no events for the GPU: {problem}"
        self._book.take({self._target: (MonitoringState(text),)})

    def _take_events(self) -> None:
        """Identify the MIG instances of events now, because their IDs may be reused later."""
        while self._events:
            identities = self._identities()
            # Popped only now: while `_identities` hangs, `check_for_hang` records the remaining events.
            try:
                event = self._events.popleft()
            except IndexError:
                return
            self._take_event(event, identities or {})

    def _take_event(self, event: HealthEvent, identities: Mapping[tuple[int, int], str]) -> bool:
        """Return whether the GPU must be polled."""
        observation = event.observation
        if observation is None:
            return True
        target = HealthTarget(self.uuid, event.gpu_instance_id, event.compute_instance_id)
        identity = identity_of(target, identities) if target.is_instance else None
        if target.is_instance and identity is None:
            self._book.warn_of_unknown(event)
            target = self._target
        if isinstance(observation, Xid):
            number = observation.number
            observation = Xid(number, self._reports_action)
            self._book.history.count_xid(self.uuid, number)
            severity = severity_of_xid(number, self._book.policy, reports_action=self._reports_action)
            if severity is None:
                self._book.note_xid(target, number)
                return number == RECOVERY_ACTION_CHANGED
        seen = () if identity is None else (InstanceSeen(identity),)
        self._book.take({target: (*seen, observation)})
        return True

    def _poll(self) -> None:
        now, state = self._book.monotonic(), self._book.state(self._target)
        is_full = self._rare is None or now >= self._rare_due or state.severity >= Severity.DEGRADED
        if is_full:
            self._rare_due = now + _RARE_EVERY_S
        try:
            polled = self._source.read(self.uuid, self._place, None if is_full else self._rare)
        except DeviceLostError as error:
            _log.debug("gpu_lost", gpu_uuid=self.uuid, reason=str(error))
            self._book.take({self._target: (Unreachable(),)})
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            _log.warning("health_unreadable_now", gpu_uuid=self.uuid, reason=str(error))
            self._book.take({self._target: (PollResult(_NOT_FOUND),)})
            return
        else:
            self._rare = None if polled.failed else polled
            self._take_poll(polled, is_full=is_full)
            if not polled.answered:
                return
        self._book.answered(self.uuid)

    def _take_poll(self, polled: PolledHealth, *, is_full: bool) -> None:
        # A partial poll repeats values of an earlier poll, so it reports no new NVLink values.
        self._on_polled(self.uuid, polled if is_full else replace(polled, nvlinks=None))
        others = [state.nvlinks for target, state in self._book.states().items() if target != self._target]
        polled = compared(polled, others)
        if "recovery_action" not in polled.failed:
            self._reports_action = polled.recovery_action is not None
        observed: dict[HealthTarget, tuple[Observation, ...]] = {self._target: (PollResult(polled),)}
        if polled.answered:
            observed |= self._of_instances(polled)
        self._book.take(observed)

    def _of_instances(self, polled: PolledHealth) -> Mapping[HealthTarget, tuple[Observation, ...]]:
        known = [item for item in self._book.states() if item.is_instance and item.gpu_uuid == self.uuid]
        identities = self._identities() if known else None
        first: tuple[Observation, ...] = (
            (Reset(),) if shows_reset(self._book.state(self._target), polled) else ()
        )
        observed: dict[HealthTarget, tuple[Observation, ...]] = {}
        for instance in known:
            seen = () if identities is None else (InstanceSeen(identity_of(instance, identities)),)
            observed[instance] = (*first, *seen, PollResult(polled))
        return observed

    def _identities(self) -> Mapping[tuple[int, int], str] | None:
        try:
            return self._source.instances(self.uuid, self._place)
        except DraDriverError:
            return None
