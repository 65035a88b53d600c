"""Watching the health of the node's GPUs.

One thread waits for NVML's events and looks at every GPU at intervals; both feed the pure model. Only real
changes are told, written to disk and published. Everybody else reads snapshots and never waits: when NVML
hangs, the thread hangs with it, the last look grows old, and what was known is not believed any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from dra_driver.core.health import DEFAULT_POLICY, HealthPolicy, observe, shows_reset
from dra_driver.core.xids import RECOVERY_ACTION_CHANGED, severity_of_xid, xid_text
from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError, StateError
from dra_driver.model.health import (
    Condition,
    HealthChange,
    HealthEvent,
    HealthState,
    HealthStates,
    InstanceSeen,
    Look,
    Observation,
    Reset,
    Severity,
    Signals,
    Subject,
    Unreachable,
    Watched,
    Xid,
    condition,
    identity_of,
)
from dra_driver.services.healthhistory import HealthHistory, change_between
from dra_driver.state.healthstore import KeptHealth

_log = structlog.get_logger(__name__)

_WAIT_S = 1.0
"""Also how long discovery waits at most before it can open NVML anew."""
_LOOK_EVERY_S = 10.0
_FRESH_S = 30.0
_EVENTS_AT_ONCE = 64


class Source(Protocol):
    """NVML. All calls raise NvmlUnavailableError while there is no driver, and RetryableError."""

    @property
    def driver_loads(self) -> int:
        """Grows when the driver was gone and answers again."""

    def driver_version(self) -> str | None:
        """The driver's version."""

    def registered(self) -> bool:
        """Whether events are waited for in the NVML session that is open now."""

    def register(self, uuids: Collection[str]) -> Mapping[str, str]:
        """Hear of these GPUs; returns why some cannot be heard."""

    def wait(self, timeout_s: float) -> HealthEvent | None:
        """The next event. Raises: DeviceLostError if some GPU was lost."""

    def read(self, gpu_uuid: str) -> Signals:
        """All polled signals. Raises: DeviceLostError."""

    def instances(self, gpu_uuid: str) -> Mapping[tuple[int, int], str]:
        """UUIDs of the MIG devices by GPU and compute instance ID. Raises: DeviceLostError."""

    def close(self) -> None:
        """Wait for events no more."""


class Store(Protocol):
    """Where health is kept over restarts."""

    def load(self) -> KeptHealth | None:
        """What was kept. Raises: StateError."""

    def save(self, kept: KeptHealth) -> None:
        """Keep it if it is something else. Raises: StateError."""


class Monitor:
    """Owns the health states.

    `gpus` tells the UUIDs of the GPUs to watch, None while they are not known. `on_change` is called after
    each change that others can see, `on_transition` with each entry of the history; both from the monitor's
    thread, and they must not block.
    """

    def __init__(
        self,
        source: Source,
        gpus: Callable[[], Collection[str] | None],
        store: Store,
        boot_id: str,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_transition: Callable[[HealthChange], None] = lambda change: None,
        is_outdated: Callable[[], bool] = lambda: False,
        policy: HealthPolicy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._gpus = gpus
        self._store = store
        self._boot_id = boot_id
        self._on_change, self._is_outdated = on_change, is_outdated
        self._policy = policy
        self._clock, self._monotonic = clock, monotonic
        self._states: HealthStates = {}
        self._looks: dict[str, tuple[int, float]] = {}
        self._history = HealthHistory(on_transition)
        self._registered: frozenset[str] | None = None
        self._heard: frozenset[str] = frozenset()
        self._told = ""
        self._is_new_boot = False
        self._driver_loads = 0
        self._driver_version: str | None = None
        self._next_look = 0.0
        self._began = monotonic()
        self._refresh, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def states(self) -> HealthStates:
        """Every state by its subject; a subject without one is well as far as is known."""
        return self._states

    def state(self, subject: Subject) -> HealthState:
        """The state of one subject."""
        return self._states.get(subject) or HealthState(subject)

    def looked_at(self, gpu_uuid: str) -> int | None:
        """When a look at the GPU came to an end last, in seconds since 1970; that it is lost is an end, too."""
        look = self._looks.get(gpu_uuid)
        return None if look is None else look[0]

    def is_fresh(self, gpu_uuid: str) -> bool:
        """Whether the last look is recent enough to say anything about the GPU."""
        look = self._looks.get(gpu_uuid)
        return look is not None and self._monotonic() - look[1] <= _FRESH_S

    def condition(self, subject: Subject) -> Condition:
        """One word: the severity, or `unknown`."""
        return condition(self._states.get(subject), is_fresh=self.is_fresh(subject.gpu_uuid))

    def history(self, gpu_uuid: str) -> Sequence[HealthChange]:
        """The last changes of a GPU and its instances since the start, oldest first."""
        return self._history.of(gpu_uuid)

    def xid_counts(self) -> Mapping[tuple[str, int], int]:
        """How often each GPU UUID reported each Xid since the start."""
        return self._history.xid_counts()

    def problem(self) -> str | None:
        """Why the health of watched GPUs is not known, None if it is."""
        if self._monotonic() - self._began <= _FRESH_S:
            return None
        stale = sorted(uuid for uuid in self._gpus() or () if not self.is_fresh(uuid))
        if not stale:
            return None
        return (
            f"NVML has not told the health of {', '.join(f'GPU {uuid}' for uuid in stale)} for more than "
            f"{_FRESH_S:.0f} s; look for Xid errors in the kernel log, a GPU may need a reset"
        )

    def start(self) -> None:
        """Load what was kept and begin. What cannot be loaded is told and observed anew."""
        self.restore()
        self._thread.start()

    def stop(self) -> None:
        """End; a thread that hangs in the driver is left behind."""
        self._stopping.set()
        self._refresh.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
            if self._thread.is_alive():
                return
        self._source.close()

    def devices_changed(self) -> None:
        """GPUs or MIG devices are others than before: register anew and look at once."""
        self._refresh.set()

    def restore(self) -> None:
        """Take over what an earlier run kept."""
        try:
            kept = self._store.load()
        except StateError as error:
            _log.error("health_not_loaded", reason=str(error))
            return
        if kept is None:
            return
        self._driver_version = kept.driver_version
        self._states = {state.subject: state for state in kept.states}
        if kept.boot_id != self._boot_id:
            self._is_new_boot = True
            # Instances never survive a boot.
            self._states = {
                subject: observe(state, Reset(), self._now(), self._policy)
                for subject, state in self._states.items()
                if not subject.is_instance
            }

    def turn(self, wait_s: float) -> None:
        """One round: look at the GPUs if that is due, then wait for events and take them in."""
        if self._is_outdated():
            self.restore()
            self._on_change()
        gpus = self._gpus()
        if not gpus:
            self._registered = None
            self._refresh.wait(wait_s)
            self._refresh.clear()
            return
        try:
            self._register(gpus)
            if self._monotonic() >= self._next_look:
                self._next_look = self._monotonic() + _LOOK_EVERY_S
                self._look_at(self._watched(gpus))
            self._hear(wait_s)
        except NvmlUnavailableError as error:
            _log.debug("health_not_read", reason=str(error))
            self._registered = None
            self._stopping.wait(wait_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.turn(_WAIT_S)
            except Exception:  # noqa: BLE001  a surprise must not end the only look at the GPUs
                _log.exception("health_failed")
                self._stopping.wait(_WAIT_S)

    def _watched(self, gpus: Collection[str]) -> list[str]:
        """A lost GPU is looked after until it is back, also when discovery does not show it any more."""
        lost = {
            subject.gpu_uuid for subject, state in self._states.items() if state.severity == Severity.LOST
        }
        return sorted({*gpus, *lost})

    def _register(self, gpus: Collection[str]) -> None:
        """Raises: NvmlUnavailableError."""
        wanted = frozenset(gpus)
        if self._registered == wanted and not self._refresh.is_set() and self._source.registered():
            return
        self._refresh.clear()
        try:
            unheard = self._source.register(sorted(wanted))
            version = self._source.driver_version()
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            self._registered, self._heard = None, frozenset()
            self._take({Subject(uuid): (Watched(_unheard(str(error))),) for uuid in wanted})
            return
        self._registered, self._heard = wanted, wanted - unheard.keys()
        self._next_look = 0.0
        if self._is_new_boot:
            # GPUs that were taken out while the node was down.
            self._is_new_boot = False
            self._states = {key: state for key, state in self._states.items() if key.gpu_uuid in wanted}
        if self._source.driver_loads != self._driver_loads or self._driver_version not in (None, version):
            self._take({subject: (Reset(),) for subject in self._states})
        self._driver_loads, self._driver_version = self._source.driver_loads, version
        self._take({Subject(uuid): (Watched(_unheard(unheard.get(uuid))),) for uuid in wanted})

    def _hear(self, wait_s: float) -> None:
        """Take in what happened, and look at the GPUs that it happened to. Raises: NvmlUnavailableError."""
        affected: set[str] = set()
        if not self._heard:
            self._stopping.wait(wait_s)
            return
        for _ in range(_EVENTS_AT_ONCE):
            try:
                event = self._source.wait(wait_s)
            except DeviceLostError:
                affected.update(self._watched(self._registered or ()))
                break
            except NvmlUnavailableError:
                raise
            except DraDriverError as error:
                self._events_failed(str(error))
                self._stopping.wait(wait_s)
                break
            if event is None:
                break
            wait_s = 0.0
            if event.gpu_uuid is None:
                affected.update(self._watched(self._registered or ()))
            elif self._take_event(event, event.gpu_uuid):
                affected.add(event.gpu_uuid)
        self._look_at(sorted(affected))

    def _events_failed(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            _log.warning("gpu_events_failed", reason=reason)
        self._registered = None

    def _take_event(self, event: HealthEvent, gpu_uuid: str) -> bool:
        """Whether it calls for a look at the GPU."""
        subject = Subject(gpu_uuid, event.gpu_instance_id, event.compute_instance_id)
        if event.observation is None:
            return True
        if isinstance(event.observation, Xid):
            number = event.observation.number
            self._history.count_xid(gpu_uuid, number)
            if severity_of_xid(number, self._policy.xids) is None:
                severity = self.state(subject).severity
                self._history.note(HealthChange(subject, self._now(), severity, severity, xid_text(number)))
                return number == RECOVERY_ACTION_CHANGED
        # Who it happened to is known now; later another instance may have the same IDs.
        identities = self._identities(gpu_uuid) if subject.is_instance else None
        seen = () if identities is None else (InstanceSeen(identity_of(subject, identities)),)
        self._take({subject: (*seen, event.observation)})
        return True

    def _look_at(self, gpu_uuids: Collection[str]) -> None:
        """Raises: NvmlUnavailableError."""
        for uuid in gpu_uuids:
            if self._stopping.is_set():
                return
            try:
                signals = self._source.read(uuid)
            except DeviceLostError as error:
                _log.debug("gpu_lost", gpu_uuid=uuid, reason=str(error))
                self._take({Subject(uuid): (Unreachable(),)})
            except NvmlUnavailableError:
                raise
            except DraDriverError as error:
                _log.warning("health_unreadable_now", gpu_uuid=uuid, reason=str(error))
                continue
            else:
                self._looked(uuid, signals)
            self._looks[uuid] = (self._now(), self._monotonic())

    def _looked(self, uuid: str, signals: Signals) -> None:
        gpu = Subject(uuid)
        was_reset = shows_reset(self.state(gpu), signals)
        news: dict[Subject, tuple[Observation, ...]] = {gpu: (Look(signals),)}
        instances = [item for item in self._states if item.is_instance and item.gpu_uuid == uuid]
        identities = self._identities(uuid) if instances else None
        for instance in instances:
            seen: tuple[Observation, ...] = (Reset(),) if was_reset else ()
            if identities is not None:
                seen += (InstanceSeen(identity_of(instance, identities)),)
            news[instance] = (*seen, Look(signals))
        self._take(news)

    def _identities(self, uuid: str) -> Mapping[tuple[int, int], str] | None:
        """None where they cannot be read now."""
        try:
            return self._source.instances(uuid)
        except DraDriverError:
            return None

    def _take(self, news: Mapping[Subject, Sequence[Observation]]) -> None:
        """Let the states be what the observations make them, tell it, and keep it."""
        now = self._now()
        states = dict(self._states)
        changes: list[HealthChange] = []
        for subject, observations in news.items():
            before = after = self.state(subject)
            for observation in observations:
                after = observe(after, observation, now, self._policy)
            states[subject] = after
            if subject.is_instance and not (after.reasons or after.setbacks):
                del states[subject]
            if after.shown != before.shown:
                changes.append(change_between(before, after, now))
        if states == self._states:
            return
        self._states = states
        # Kept before it is told: a crash in between must not forget what others saw already.
        try:
            self._store.save(KeptHealth(self._boot_id, self._driver_version, tuple(states.values())))
        except StateError as error:
            _log.error("health_not_kept", reason=str(error))
        for change in changes:
            self._history.add(change)
        if changes:
            self._on_change()

    def _now(self) -> int:
        return int(self._clock())


def _unheard(problem: str | None) -> str | None:
    return None if problem is None else f"events of the GPU cannot be heard: {problem}"
