"""What the probes say: alive, started, ready; if not, with the reason.

A rolling update waits for readiness before it goes on to the next node. So readiness fails for faults that a bad
release or a bad configuration causes on every node: the kubelet refuses the plugin, or nothing can be published. It
does not fail for bad GPUs of this node, nor if the API server stops answering later. The new release does not cause
that, it would not help to stop the update of all other nodes, and the plugin serves claims meanwhile. Such trouble is a
note in the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from dra_driver.inventory.discovery import NOT_DISCOVERED, Discovery

if TYPE_CHECKING:
    from dra_driver.kubelet.plugin import KubeletPlugin
    from dra_driver.slices.publisher import Publisher

_log = structlog.get_logger(__name__)

_NOT_REGISTERED = (
    "the kubelet has not registered the plugin yet; if that lasts, check that its plugin registry directory is "
    "mounted at the same path"
)
_STARTING = "gpu-dra-driver is still starting; if that lasts, see the log for the part that does not start"
_STOPPING = "gpu-dra-driver is stopping; another instance takes over, or the pod starts again"


@dataclass(eq=False)
class Probes:
    """Answers for the kubelet's probes, by gRPC and by HTTP: lists of sentences, empty if all is well.

    Plugin and publisher are None before they are made. `problems` returns a sentence for each problem of the node; they
    are notes only.
    """

    plugin: Callable[[], KubeletPlugin | None]
    discovery: Discovery
    publisher: Callable[[], Publisher | None]
    problems: Callable[[], Sequence[str]]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: list[str] | None = None

    def startup(self) -> list[str]:
        """Why the sockets have never answered yet."""
        plugin = self.plugin()
        return _listed(_STARTING if plugin is None else plugin.liveness.start_fault())

    def liveness(self) -> list[str]:
        """Why the kubelet cannot reach the sockets; nothing else can fail this."""
        plugin = self.plugin()
        return _listed(None if plugin is None else plugin.liveness.fault())

    def readiness(self) -> list[str]:
        """Why a rolling update must not go on to the next node."""
        faults = [*self._registration_faults(), *self._device_faults()[0], *self._slice_faults()[0]]
        self._log_changes(faults)
        return faults

    def is_ready(self) -> bool:
        """Readiness as yes or no."""
        return not self.readiness()

    def notes(self) -> list[str]:
        """Trouble of this node that fails no probe, one sentence each."""
        failing = self.readiness()
        found = dict.fromkeys([*self._device_faults()[1], *self._slice_faults()[1], *self.problems()])
        return [note for note in found if note not in failing]

    def _registration_faults(self) -> list[str]:
        plugin = self.plugin()
        if plugin is None or plugin.status is None:
            return [_NOT_REGISTERED]
        if plugin.stopping:
            return [_STOPPING]
        if not plugin.status.registered:
            return [f"the kubelet refused the plugin: {plugin.status.error}; see the kubelet's log for more"]
        return []

    def _device_faults(self) -> tuple[list[str], list[str]]:
        """Faults and notes. If nothing is known of the devices yet, that is a fault; any known trouble is a note."""
        problem = self.discovery.problem()
        told = _listed(problem)
        return (told, []) if problem == NOT_DISCOVERED else ([], told)

    def _slice_faults(self) -> tuple[list[str], list[str]]:
        """Faults and notes. Without devices there is nothing to publish; the note of the devices says why."""
        publisher = self.publisher()
        problem = None if publisher is None else publisher.problem
        told = _listed(_STARTING if publisher is None else problem and f"slices: {problem}")
        if self.discovery.problem() not in (None, NOT_DISCOVERED):
            return [], told
        was_published = publisher is not None and publisher.wait_published(0.0)
        return ([], told) if was_published else (told, [])

    def _log_changes(self, faults: list[str]) -> None:
        with self._lock:
            before, self._logged = self._logged, faults
        if faults and faults != before:
            _log.info("not_ready", reasons=faults)
        elif not faults and before != []:
            _log.info("ready")


def _listed(fault: str | None) -> list[str]:
    return [] if fault is None else [fault]
