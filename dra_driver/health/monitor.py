"""Watching the health of the node's GPUs.

One thread waits for NVML's events and polls every GPU at intervals; both feed the pure model. Only real changes are
told, written to disk and published. Everybody else reads snapshots and never waits: when NVML hangs, the thread hangs
with it, the last poll becomes old, and nobody relies on what was known before. That an operation of this plugin hangs
on a GPU is therefore taken in by another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import structlog

from dra_driver.concurrency.worker import BackgroundWorker
from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError, StateError
from dra_driver.health.history import HealthHistory, change_between
from dra_driver.health.rules.state import observe, shows_reset
from dra_driver.health.rules.xids import (
    NO_CHANGES,
    RECOVERY_ACTION_CHANGED,
    XidPolicy,
    severity_of_xid,
    xid_text,
)
from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.model.gpu import FabricRegistration
from dra_driver.model.health import (
    UNRESPONSIVE,
    Hanging,
    HealthChange,
    HealthEvent,
    HealthState,
    HealthStates,
    HealthTarget,
    InstanceSeen,
    MonitoringState,
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
    from dra_driver.nvml.events import HealthSource

_log = structlog.get_logger(__name__)

_WAIT_S = 1.0
"""Also how long discovery waits at most before it can open NVML anew."""
_POLL_EVERY_S = 10.0
_FRESH_S = 30.0
_FORGET_AFTER_S = 600.0
_EVENTS_AT_ONCE = 64
_NOT_FOUND = PolledHealth(failed=frozenset({"handle"}), answered=False)
"""A poll that could not even find the GPU."""


@dataclass(eq=False)
class Monitor(BackgroundWorker):
    """Owns the health states.

    `gpus` returns the PCI bus IDs of the GPUs to watch by their UUIDs, None while they are not known. `is_on_bus` says
    whether the NVIDIA driver is bound to a bus ID. `on_change` is called after each change that others can see, and
    when the health of a GPU is known again. `on_transition` is called with each entry of the history, `on_fabric` with
    a GPU's UUID and registration whenever a poll has read its fabric. They must not block. `hanging` returns which
    operation of this plugin hangs on which GPU UUID, and since when by the monotonic clock.

    A GPU that was taken out (pulled, drained, or given to another driver) is forgotten after a while:

        watched ──not among `gpus`──▶ missing ──its place is empty or another's, for ten minutes──▶ forgotten
           ▲                             │
           └────────it is back───────────┘     a lost GPU that is still on the bus stays lost
    """

    source: HealthSource
    gpus: Callable[[], Mapping[str, str | None] | None]
    is_on_bus: Callable[[str], bool]
    store: HealthStore
    boot_id: str
    _: KW_ONLY
    on_change: Callable[[], None]
    on_transition: Callable[[HealthChange], None]
    on_fabric: Callable[[str, FabricRegistration], None]
    hanging: Callable[[], Mapping[str, tuple[str, float]]] = dict
    policy: XidPolicy = NO_CHANGES
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._states: HealthStates = {}
        self._changing = (
            threading.RLock()
        )  # held for every change of the states, and never for a call of NVML
        self._polls: dict[str, tuple[int, float]] = {}  # when each GPU was polled last, on both clocks
        self._history = HealthHistory(self.on_transition)
        self._places: dict[str, str] = {}  # PCI bus IDs by UUID, of all GPUs that were watched
        self._missing: dict[str, float] = {}  # since when a GPU is not on the bus, by the monotonic clock
        self._registered: frozenset[str] | None = None
        self._heard: frozenset[str] = frozenset()
        self._tell_action: set[str] = set()  # GPUs whose driver tells a recovery action
        self._told = ""
        self._warned: set[str | None] = set()
        self._is_new_boot = False
        self._driver_loads = 0
        self._driver_version: str | None = None
        self._next_poll = 0.0
        self._began = self.monotonic()
        self._refresh = threading.Event()
        super().__init__(
            "health", lambda: self.turn(_WAIT_S), crash_event="health_failed", on_crash=self._crashed
        )

    def states(self) -> HealthStates:
        """Every state by its target. A target without a state is well, as far as is known."""
        return self._states

    def state(self, target: HealthTarget) -> HealthState:
        """The state of one target."""
        return self._states.get(target) or HealthState(target)

    def polled_at(self, gpu_uuid: str) -> int | None:
        """When the last poll of the GPU ended, in seconds since 1970; one that found it lost counts too."""
        poll = self._polls.get(gpu_uuid)
        return None if poll is None else poll[0]

    def is_fresh(self, gpu_uuid: str) -> bool:
        """Whether the last poll is recent enough to say anything about the GPU."""
        poll = self._polls.get(gpu_uuid)
        return poll is not None and self.monotonic() - poll[1] <= _FRESH_S

    def history(self, gpu_uuid: str) -> Sequence[HealthChange]:
        """The last changes of a GPU and its instances since the start, oldest first."""
        return self._history.of(gpu_uuid)

    def xid_counts(self) -> Mapping[tuple[str, int], int]:
        """How often each GPU UUID reported each Xid since the start."""
        return self._history.xid_counts()

    def problem(self) -> str | None:
        """Why the health of some watched GPUs is not known; None if all is known."""
        if self.monotonic() - self._began <= _FRESH_S:
            return None
        stale = sorted(uuid for uuid in self.gpus() or () if not self.is_fresh(uuid))
        if not stale:
            return None
        return (
            f"NVML has not told the health of {', '.join(f'GPU {uuid}' for uuid in stale)} for more than "
            f"{_FRESH_S:.0f} s; look for Xid errors in the kernel log, a GPU may need a reset"
        )

    def unresponsive(self) -> str | None:
        """Which GPUs do not react because an operation hangs on them; None if there is none."""
        return (
            "; ".join(
                f"{target}: {reason.text}"
                for target, state in self._states.items()
                for reason in state.reasons
                if reason.key == UNRESPONSIVE
            )
            or None
        )

    def look_for_hangs(self) -> None:
        """Take in which operations hang on which GPU, and which have ended. It calls no NVML, so another thread can do
        it while the monitor's own thread hangs there."""
        now = self.monotonic()
        ended = {target: (Hanging(),) for target, state in self._states.items() if state.has(UNRESPONSIVE)}
        hanging = {
            HealthTarget(uuid): (Hanging(what, now - since),)
            for uuid, (what, since) in self.hanging().items()
        }
        self._take(ended | hanging)

    def start(self) -> None:
        """Load what was kept and begin. What cannot be loaded is told and observed anew."""
        self.restore()
        super().start()

    def stop(self) -> bool:
        """End; a thread that hangs in the NVIDIA driver is left behind."""
        has_ended = super().stop()
        if has_ended:
            self.source.close()
        return has_ended

    def devices_changed(self) -> None:
        """GPUs or MIG devices are others than before: register anew and poll at once."""
        self._refresh.set()
        self.wake()

    def restore(self) -> None:
        """Take over what an earlier run kept."""
        with self._changing:
            try:
                kept = self.store.load()
            except StateError as error:
                _log.error("health_not_loaded", reason=str(error))
                return
            if kept is None:
                return
            self._driver_version = kept.driver_version
            self._states = {state.target: state for state in kept.states}
            if kept.boot_id != self.boot_id:
                self._is_new_boot = True
                # Instances never survive a boot.
                self._states = {
                    target: observe(state, Reset(), self._now(), self.policy)
                    for target, state in self._states.items()
                    if not target.is_instance
                }

    def turn(self, wait_s: float) -> float:
        """One round: poll the GPUs if that is due, then wait for events and take them in.

        Returns how long to pause before the next round.
        """
        if self.store.is_outdated():
            self.restore()
            self.on_change()
        gpus = self.gpus()
        if gpus is None:
            self._missing = {}
        else:
            self._forget_gone(gpus)
        if not gpus:
            self._registered = None
            return wait_s
        try:
            self._register(gpus)
            if self.monotonic() >= self._next_poll:
                self._next_poll = self.monotonic() + _POLL_EVERY_S
                self._poll(self._watched(gpus))
            self._hear(wait_s)
        except NvmlUnavailableError as error:
            _log.debug("health_not_read", reason=str(error))
            self._registered = None
            self.pause(wait_s)
        return 0.0

    def _crashed(self, _error: Exception) -> float:
        self.pause(_WAIT_S)
        return 0.0

    def _watched(self, gpus: Collection[str]) -> list[str]:
        """A lost GPU is watched until it is back, also when discovery does not show it any more."""
        lost = {target.gpu_uuid for target, state in self._states.items() if state.severity == Severity.LOST}
        return sorted({*gpus, *lost})

    def _forget_gone(self, gpus: Mapping[str, str | None]) -> None:
        self._places.update((uuid, place) for uuid, place in gpus.items() if place is not None)
        known = {target.gpu_uuid for target in self._states}
        gone = {uuid for uuid in known - gpus.keys() if self._is_place_empty(uuid, gpus)}
        now = self.monotonic()
        self._missing = {uuid: self._missing.get(uuid, now) for uuid in gone}
        self._forget([uuid for uuid, since in self._missing.items() if now - since >= _FORGET_AFTER_S])

    def _is_place_empty(self, uuid: str, gpus: Mapping[str, str | None]) -> bool:
        """False also while the place is not known. It is known again when the GPU is back, or its state ends with a
        reboot."""
        place = self.state(HealthTarget(uuid)).pci_bus_id
        return place is not None and (place in gpus.values() or not self.is_on_bus(place))

    def _forget(self, gpu_uuids: Collection[str]) -> None:
        """Drop all that is known of GPUs that were taken out, and tell."""
        if not gpu_uuids:
            return
        with self._changing:
            gone = [self.state(HealthTarget(uuid)) for uuid in sorted(gpu_uuids)]
            self._keep({key: state for key, state in self._states.items() if key.gpu_uuid not in gpu_uuids})
            for state in gone:
                uuid = state.target.gpu_uuid
                self._polls.pop(uuid, None)
                self._missing.pop(uuid, None)
                self._places.pop(uuid, None)
                at = f" at {state.pci_bus_id}" if state.pci_bus_id else ""
                text = f"the NVIDIA driver no longer has the GPU{at}; its health is forgotten"
                change = HealthChange(
                    state.target, self._now(), state.severity, Severity.OK, text, is_gone=True
                )
                self._history.forget(change)
            self.on_change()

    def _register(self, gpus: Collection[str]) -> None:
        """Raises: NvmlUnavailableError."""
        wanted = frozenset(gpus)
        if self._registered == wanted and not self._refresh.is_set() and self.source.registered():
            return
        self._refresh.clear()
        try:
            unheard = self.source.register(sorted(wanted))
            version = self.source.driver_version()
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            self._registered, self._heard = None, frozenset()
            self._take({HealthTarget(uuid): (MonitoringState(_not_heard(str(error))),) for uuid in wanted})
            return
        self._registered, self._heard = wanted, wanted - unheard.keys()
        self._next_poll = 0.0
        if self._is_new_boot:
            # Of those whose place is not known; others are forgotten when their place is empty for a while.
            self._is_new_boot = False
            unknown = {
                key.gpu_uuid
                for key in self._states
                if self.state(HealthTarget(key.gpu_uuid)).pci_bus_id is None
            }
            self._forget(unknown - wanted)
        if self.source.driver_loads != self._driver_loads or self._driver_version not in (None, version):
            self._take({target: (Reset(),) for target in self._states})
        self._driver_loads, self._driver_version = self.source.driver_loads, version
        self._take({HealthTarget(uuid): (MonitoringState(_not_heard(unheard.get(uuid))),) for uuid in wanted})

    def _hear(self, wait_s: float) -> None:
        """Take in the events, and poll the GPUs that they happened to. Raises: NvmlUnavailableError."""
        affected: set[str] = set()
        if not self._heard:
            self.pause(wait_s)
            return
        for _ in range(_EVENTS_AT_ONCE):
            try:
                event = self.source.wait(wait_s)
            except DeviceLostError:
                affected.update(self._watched(self._registered or ()))
                break
            except NvmlUnavailableError:
                raise
            except DraDriverError as error:
                self._events_failed(str(error))
                self.pause(wait_s)
                break
            if event is None:
                break
            wait_s = 0.0
            if event.gpu_uuid is None or event.gpu_uuid not in (self._registered or ()):
                self._warn_of_unknown(event)
                affected.update(self._watched(self._registered or ()))
            elif self._take_event(event, event.gpu_uuid):
                affected.add(event.gpu_uuid)
        self._poll(sorted(affected))

    def _warn_of_unknown(self, event: HealthEvent) -> None:
        """Tell, once for each GPU, of an event whose GPU or instance NVML does not show."""
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

    def _events_failed(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            _log.warning("gpu_events_failed", reason=reason)
        self._registered = None

    def _take_event(self, event: HealthEvent, gpu_uuid: str) -> bool:
        """Whether the event calls for a poll of the GPU."""
        observation = event.observation
        if observation is None:
            return True
        target = HealthTarget(gpu_uuid, event.gpu_instance_id, event.compute_instance_id)
        # The instance is identified now: later another one may have the same IDs.
        identity = identity_of(target, self._identities(gpu_uuid) or {}) if target.is_instance else None
        if target.is_instance and identity is None:
            self._warn_of_unknown(event)
            target = HealthTarget(gpu_uuid)
        if isinstance(observation, Xid):
            number, is_told = observation.number, gpu_uuid in self._tell_action
            observation = Xid(number, is_told)
            self._history.count_xid(gpu_uuid, number)
            if severity_of_xid(number, self.policy, action_is_told=is_told) is None:
                severity = self.state(target).severity
                with self._changing:
                    self._history.note(
                        HealthChange(target, self._now(), severity, severity, xid_text(number))
                    )
                return number == RECOVERY_ACTION_CHANGED
        seen = () if identity is None else (InstanceSeen(identity),)
        self._take({target: (*seen, observation)})
        return True

    def _poll(self, gpu_uuids: Collection[str]) -> None:
        """Raises: NvmlUnavailableError."""
        is_news = False
        for uuid in gpu_uuids:
            if self.is_stopping:
                return
            try:
                polled = self.source.read(uuid)
            except DeviceLostError as error:
                _log.debug("gpu_lost", gpu_uuid=uuid, reason=str(error))
                self._take({HealthTarget(uuid): (Unreachable(),)})
            except NvmlUnavailableError:
                raise
            except DraDriverError as error:
                _log.warning("health_unreadable_now", gpu_uuid=uuid, reason=str(error))
                self._take({HealthTarget(uuid): (PollResult(_NOT_FOUND),)})
                continue
            else:
                self._take_poll(uuid, polled)
                if not polled.answered:
                    continue
            is_news |= not self.is_fresh(uuid)
            self._polls[uuid] = (self._now(), self.monotonic())
        if is_news:
            self.on_change()

    def _take_poll(self, uuid: str, polled: PolledHealth) -> None:
        gpu = HealthTarget(uuid)
        if polled.fabric is not None:
            self.on_fabric(uuid, polled.fabric_registration)
        if "recovery_action" not in polled.failed:
            (self._tell_action.discard if polled.recovery_action is None else self._tell_action.add)(uuid)
        if not polled.answered:
            self._take({gpu: (PollResult(polled),)})
            return
        was_reset = shows_reset(self.state(gpu), polled)
        observed: dict[HealthTarget, tuple[Observation, ...]] = {gpu: (PollResult(polled),)}
        instances = [item for item in self._states if item.is_instance and item.gpu_uuid == uuid]
        identities = self._identities(uuid) if instances else None
        for instance in instances:
            seen: tuple[Observation, ...] = (Reset(),) if was_reset else ()
            if identities is not None:
                seen += (InstanceSeen(identity_of(instance, identities)),)
            observed[instance] = (*seen, PollResult(polled))
        self._take(observed)

    def _identities(self, uuid: str) -> Mapping[tuple[int, int], str] | None:
        """None where they cannot be read now."""
        try:
            return self.source.instances(uuid)
        except DraDriverError:
            return None

    def _take(self, observed: Mapping[HealthTarget, Sequence[Observation]]) -> None:
        """Change the states by the observations, keep them on disk, and tell of the changes."""
        with self._changing:
            now = self._now()
            states = dict(self._states)
            changes: list[HealthChange] = []
            for target, observations in observed.items():
                before = after = self.state(target)
                for observation in observations:
                    after = observe(after, observation, now, self.policy)
                if not target.is_instance:
                    after = replace(after, pci_bus_id=self._places.get(target.gpu_uuid, after.pci_bus_id))
                states[target] = after
                if target.is_instance and not (after.reasons or after.setbacks):
                    del states[target]
                if after.shown != before.shown:
                    changes.append(change_between(before, after, now))
            if states == self._states:
                return
            # Kept before anybody is told: after a crash in between nothing is forgotten that others saw already.
            self._keep(states)
            for change in changes:
                self._history.add(change)
            if changes:
                self.on_change()

    def _keep(self, states: HealthStates) -> None:
        self._states = states
        try:
            self.store.save(KeptHealth(self.boot_id, self._driver_version, tuple(states.values())))
        except StateError as error:
            _log.error("health_not_kept", reason=str(error))

    def _now(self) -> int:
        return int(self.clock())


def _not_heard(problem: str | None) -> str | None:
    return None if problem is None else f"events of the GPU cannot be heard: {problem}"
