"""What the probes say: alive, started, ready; with a reason for each no.

Readiness is what a rolling update waits for before it goes on to the next node. So it fails for what a bad release
or a bad configuration breaks on every node alike: the kubelet refuses us, nothing can be published. It does not fail
for trouble of this node's GPUs, nor for an API server that goes away later: a new release is not the cause, holding
up the update of all other nodes is no cure, and claims are served all the while. Such trouble is a note beside the
answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.services.discovery import NvmlState

_log = structlog.get_logger(__name__)

_NOTHING_KNOWN = NvmlState().problem
_NOT_REGISTERED = (
    "the kubelet has not registered the plugin yet; if that lasts, check that its plugin registry directory is "
    "mounted at the same path"
)
_STARTING = "the driver is still starting; if that lasts, the log says at what"
_STOPPING = "the driver is stopping; another instance takes over, or the pod starts again"


class Alive(Protocol):
    """Whether the plugin's own sockets answer; None or what is wrong."""

    def fault(self) -> str | None: ...

    def start_fault(self) -> str | None: ...


class Plugin(Protocol):
    """The kubelet's side of the driver."""

    @property
    def liveness(self) -> Alive: ...

    @property
    def status(self) -> RegistrationStatus | None: ...

    @property
    def stopping(self) -> bool: ...


class Devices(Protocol):
    """The discovery of devices."""

    def problem(self) -> str | None: ...


class Publishing(Protocol):
    """The publisher of slices."""

    @property
    def problem(self) -> str | None: ...

    def wait_published(self, timeout_s: float) -> bool: ...


class Probes:
    """Answers for the kubelet's probes, by gRPC and HTTP alike: lists of sentences, empty when all is well.

    Plugin and publisher may be None as long as they are not there. `others` are looked at for notes only; each
    says what is wrong or None.
    """

    def __init__(
        self,
        plugin: Callable[[], Plugin | None],
        devices: Devices,
        publisher: Callable[[], Publishing | None],
        others: Sequence[Callable[[], str | None]] = (),
    ) -> None:
        self._plugin = plugin
        self._devices = devices
        self._publisher = publisher
        self._others = others
        self._lock = threading.Lock()
        self._told: list[str] | None = None

    def startup(self) -> list[str]:
        """Why the sockets have not answered once yet."""
        plugin = self._plugin()
        return _listed(_STARTING if plugin is None else plugin.liveness.start_fault())

    def liveness(self) -> list[str]:
        """Why the kubelet cannot reach the sockets; nothing else can fail this."""
        plugin = self._plugin()
        return _listed(None if plugin is None else plugin.liveness.fault())

    def readiness(self) -> list[str]:
        """Why a rolling update should not go on to the next node."""
        faults = [*self._registration_faults(), *self._device_faults()[0], *self._slice_faults()[0]]
        self._tell(faults)
        return faults

    def is_ready(self) -> bool:
        """Readiness as yes or no."""
        return not self.readiness()

    def notes(self) -> list[str]:
        """What is wrong beside that: trouble of this node that fails no probe."""
        found = [*self._device_faults()[1], *self._slice_faults()[1]]
        return [*found, *(note for note in (other() for other in self._others) if note)]

    def _registration_faults(self) -> list[str]:
        plugin = self._plugin()
        if plugin is None or plugin.status is None:
            return [_NOT_REGISTERED]
        if plugin.stopping:
            return [_STOPPING]
        if not plugin.status.registered:
            return [f"the kubelet refused the plugin: {plugin.status.error}; see the kubelet's log for more"]
        return []

    def _device_faults(self) -> tuple[list[str], list[str]]:
        """Faults and notes. Known to be in trouble is known; only that nothing is known yet is a fault."""
        problem = self._devices.problem()
        told = _listed(problem)
        return (told, []) if problem == _NOTHING_KNOWN else ([], told)

    def _slice_faults(self) -> tuple[list[str], list[str]]:
        """Faults and notes. Without devices there is nothing to publish, and the devices' note says why."""
        publisher = self._publisher()
        problem = None if publisher is None else publisher.problem
        told = _listed(_STARTING if publisher is None else problem and f"slices: {problem}")
        if self._devices.problem() not in (None, _NOTHING_KNOWN):
            return [], told
        was_published = publisher is not None and publisher.wait_published(0.0)
        return ([], told) if was_published else (told, [])

    def _tell(self, faults: list[str]) -> None:
        with self._lock:
            before, self._told = self._told, faults
        if faults and faults != before:
            _log.info("not_ready", reasons=faults)
        elif not faults and before != []:
            _log.info("ready")


def _listed(fault: str | None) -> list[str]:
    return [] if fault is None else [fault]
