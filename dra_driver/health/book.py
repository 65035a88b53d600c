"""The health of all GPUs: the states, their history, and the file that stores them.

Any thread may record observations. The lock is never held during an NVML call, disk access or a callback, so a hang
affects only its own GPU or component.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import StateError
from dra_driver.health.rules.state import XID, observe, rebooted, waits_for_reset
from dra_driver.health.rules.xids import NO_CHANGES, XidPolicy, xid_text
from dra_driver.health.store import HealthStore, KeptHealth, ServicedGpus
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.health import (
    LOST,
    UNRESPONSIVE,
    HealthChange,
    HealthEvent,
    HealthState,
    HealthStates,
    HealthTarget,
    Observation,
    Reason,
    Serviced,
    Severity,
    Xid,
)

_KEPT = 32
_log = structlog.get_logger(__name__)

_WRITE_AGAIN_S = 5.0
FRESH_S = 30.0
OVERDUE_S = 30.0
"""A longer NVML call counts as hanging, although one that waits for the GPU's system processor may take 60 s."""


class HealthThread(BackgroundWorker):
    def __init__(self, name: str, work: Callable[[], float], again_s: float) -> None:
        super().__init__(name, work, lambda _error: again_s)


@dataclass(eq=False)
class HealthBook:
    """Several threads call `on_shown` after each visible change, and when the health of a GPU is known again, and
    `on_transition` after each new entry of the history. Both must not block.
    """

    store: HealthStore
    boot_id: str
    on_shown: Callable[[], object]
    on_transition: Callable[[HealthChange], None]
    serviced: ServicedGpus | None = None
    policy: XidPolicy = NO_CHANGES
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard = threading.Lock()
        self._states: HealthStates = {}
        self._logged = ""
        self._warned: set[str | None] = set()
        self._answers: dict[str, tuple[int, float]] = {}  # when each GPU last answered, on both clocks
        self.history = HealthHistory(self.on_transition)
        # PCI bus IDs by UUID, of all GPUs that were ever watched.
        self.places: dict[str, str] = {}
        self.driver_version: str | None = None
        self.is_new_boot = False
        self.writer = HealthThread("health-file", self.write, _WRITE_AGAIN_S)

    def states(self) -> HealthStates:
        return self._states

    def state(self, target: HealthTarget) -> HealthState:
        return self._states.get(target) or HealthState(target)

    def now(self) -> int:
        return int(self.clock())

    def answered_at(self, gpu_uuid: str) -> int | None:
        """Return when the GPU last answered, in seconds since 1970. A poll that finds it lost counts as an answer."""
        answer = self._answers.get(gpu_uuid)
        return None if answer is None else answer[0]

    def is_fresh(self, gpu_uuid: str) -> bool:
        answer = self._answers.get(gpu_uuid)
        return answer is not None and self.monotonic() - answer[1] <= FRESH_S

    def answered(self, gpu_uuid: str) -> None:
        is_news = not self.is_fresh(gpu_uuid)
        self._answers[gpu_uuid] = (self.now(), self.monotonic())
        if is_news:
            self.writer.wake()
            self.on_shown()

    def take(self, observed: Mapping[HealthTarget, Sequence[Observation]]) -> None:
        now, changes = self.now(), []
        with self._guard:
            states = dict(self._states)
            for target, observations in observed.items():
                before = after = self.state(target)
                for observation in observations:
                    after = observe(after, observation, now, self.policy)
                if not target.is_instance:
                    after = replace(after, pci_bus_id=self.places.get(target.gpu_uuid, after.pci_bus_id))
                states[target] = after
                if target.is_instance and not (after.reasons or after.setbacks):
                    del states[target]
                if after.shown != before.shown:
                    changes.append(change_between(before, after, now))
            if states == self._states:
                return
            self._states = states
        self.writer.wake()
        if changes:
            self.on_shown()
        for change in changes:
            self.history.add(change)

    def note_xid(self, target: HealthTarget, number: int) -> None:
        severity = self.state(target).severity
        self.history.note(
            HealthChange(target, self.now(), severity, severity, xid_text(number, Severity.INFORMATION))
        )

    def warn_of_unknown(self, event: HealthEvent) -> None:
        """Log an event whose GPU or instance NVML does not list, once for each GPU."""
        if event.gpu_uuid in self._warned:
            return
        self._warned.add(event.gpu_uuid)
        _log.warning(
            "event_of_unknown_device",
            gpu_uuid=event.gpu_uuid,
            gpu_instance_id=event.gpu_instance_id,
            compute_instance_id=event.compute_instance_id,
            xid=event.observation.number if isinstance(event.observation, Xid) else None,
        )

    def forget(self, gpu_uuids: Collection[str]) -> None:
        if not gpu_uuids:
            return
        with self._guard:
            gone = [self.state(HealthTarget(uuid)) for uuid in sorted(gpu_uuids)]
            self._states = {
                key: state for key, state in self._states.items() if key.gpu_uuid not in gpu_uuids
            }
        self.writer.wake()
        self.on_shown()
        for state in gone:
            self._answers.pop(state.target.gpu_uuid, None)
            self.places.pop(state.target.gpu_uuid, None)
            at = f" at {state.pci_bus_id}" if state.pci_bus_id else ""
            text = (
                f"the NVIDIA driver no longer manages the GPU{at}; gpu-dra-driver discards its health history"
            )
            self.history.forget(
                HealthChange(state.target, self.now(), state.severity, Severity.OK, text, is_gone=True)
            )

    def restore(self) -> None:
        try:
            kept = self.store.load()
        except StateError as error:
            _log.error("health_not_loaded", reason=str(error))
            return
        if kept is None:
            return
        states = kept.states
        if kept.boot_id != self.boot_id:
            self.is_new_boot = True
            # Instances never survive a boot.
            states = tuple(rebooted(state, self.now()) for state in states if not state.target.is_instance)
        with self._guard:
            self._states = {state.target: state for state in states}
            self.driver_version = kept.driver_version

    def write(self) -> float:
        self._take_serviced()
        known = tuple(sorted(uuid for uuid in tuple(self._answers) if self.is_fresh(uuid)))
        try:
            self.store.save(
                KeptHealth(self.boot_id, self.driver_version, tuple(self._states.values()), known)
            )
        except StateError as error:
            if str(error) != self._logged:
                _log.error("health_not_saved", reason=str(error))
            self._logged = str(error)
        else:
            self._logged = ""
        return _WRITE_AGAIN_S

    def _take_serviced(self) -> None:
        """Run in the writer's thread, because no other health thread may wait for the disk."""
        try:
            times = {} if self.serviced is None else self.serviced.times()
        except StateError:
            return  # `gpu-dra-driver serviced` reports that no reason ended, and replaces a damaged file
        self.take(
            {
                target: (Serviced(times[target.gpu_uuid]),)
                for target, state in self._states.items()
                if target.gpu_uuid in times and any(map(waits_for_reset, state.reasons))
            }
        )


class HealthHistory:
    """The last changes of each GPU, and its Xid counts.

    `on_transition` is called with each new change, and with repeated changes from or to a state that keeps pods away.
    """

    def __init__(self, on_transition: Callable[[HealthChange], None]) -> None:
        self._on_transition = on_transition
        self._changes: dict[str, deque[HealthChange]] = {}
        self._xids: Counter[tuple[str, int]] = Counter()
        self._guard = threading.Lock()  # never held during a call of `on_transition`

    def of(self, gpu_uuid: str) -> Sequence[HealthChange]:
        """Return the last changes of a GPU and its instances, oldest first."""
        with self._guard:
            return tuple(self._changes.get(gpu_uuid, ()))

    def xid_counts(self) -> Mapping[tuple[str, int], int]:
        with self._guard:
            return dict(self._xids)

    def count_xid(self, gpu_uuid: str, number: int) -> None:
        with self._guard:
            self._xids[gpu_uuid, number] += 1

    def forget(self, gone: HealthChange) -> None:
        with self._guard:
            self._changes.pop(gone.target.gpu_uuid, None)
            for key in [key for key in self._xids if key[0] == gone.target.gpu_uuid]:
                del self._xids[key]
        self._publish(gone)

    def add(self, change: HealthChange) -> None:
        """Record a change of a state. A slowdown that comes and goes is reported only once."""
        is_known = self._keep(change)
        if not is_known or max(change.before, change.after) >= Severity.DEGRADED:
            self._publish(change)

    def note(self, event: HealthChange) -> None:
        """Record an event that changed nothing. Repeated events are reported only once."""
        if not self._keep(event):
            self._publish(event)

    def _keep(self, change: HealthChange) -> bool:
        """Return whether the change repeats an earlier one, whose entry it replaces."""
        with self._guard:
            entries = self._changes.setdefault(change.target.gpu_uuid, deque(maxlen=_KEPT))
            same = next((kept for kept in entries if _is_same(kept, change)), None)
            if same is not None:
                entries.remove(same)
                change = replace(change, times=same.times + 1)
            entries.append(change)
            return same is not None

    def _publish(self, change: HealthChange) -> None:
        _log_change(change)
        try:
            self._on_transition(change)
        except Exception:  # noqa: BLE001  a listener must not end the watch
            _log.exception("health_listener_failed")


def change_between(before: HealthState, after: HealthState, now: int) -> HealthChange:
    known = {reason.name: reason.text for reason in before.reasons}
    active = {reason.name: reason.text for reason in after.reasons}
    came = [text for name, text in active.items() if known.get(name) != text]
    gone = [_short(reason) for reason in before.reasons if reason.name not in active]
    went = [f"{'no longer' if active else 'healthy again after'}: {', '.join(gone)}"] if gone else []
    is_hang = any(reason.key == UNRESPONSIVE and reason.text in came for reason in after.reasons)
    text = "; ".join(came + went)
    return HealthChange(after.target, now, before.severity, after.severity, text, is_hang=is_hang)


def _short(reason: Reason) -> str:
    return {LOST: "GPU lost", XID: f"Xid {reason.value}"}.get(reason.key, reason.text)


def _is_same(kept: HealthChange, change: HealthChange) -> bool:
    return kept == replace(change, at=kept.at, times=kept.times)


def _log_change(change: HealthChange) -> None:
    log = _log.warning if change.after > change.before else _log.info
    log(
        "health_changed",
        subject=str(change.target),
        before=change.before.name.lower(),
        after=change.after.name.lower(),
        reasons=change.text,
    )
