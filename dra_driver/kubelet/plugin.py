"""The kubelet plugin: starts and stops its sockets, registration, probes and device health stream in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import FatalError
from dra_driver.kubelet import dra
from dra_driver.kubelet.grpc_server import Methods, SocketServer, streaming
from dra_driver.kubelet.liveness import HealthServer, Liveness, dial
from dra_driver.kubelet.pb import dra_health_v1_pb2 as pb
from dra_driver.kubelet.registration import PluginOwner, Registrar, RegistrationStatus, SocketWatch
from dra_driver.kubelet.sockets import (
    PLUGINS_DIR,
    REGISTRY_DIR,
    SocketPaths,
    ensure_plugin_dir,
    ensure_registry_dir,
    socket_paths,
)
from dra_driver.model.dataclass import dataclass
from dra_driver.model.problems import NodeProblem

HEALTH_VERSIONS = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""Kubelet 1.36 opens the v1alpha1 stream unasked, and retries every five seconds while the response is Unimplemented.
Kubelet 1.37 opens only an advertised stream, v1 if available.
"""
DeviceHealthWatch = Callable[[Any, Any], Iterator[pb.NodeWatchResourcesResponse]]
"""Gets the request and gRPC's context; yields the health of all devices after each change."""

_log = structlog.get_logger(__name__)

_WITHDRAWAL_GRACE_S = 1.0
_REGISTERED_WITHIN_S = 30.0
_DIAL_EVERY_S = 30.0
"""A kubelet that probes the plugin makes it dial more often."""
_UNREACHABLE_FOR_S = 10.0


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """How the plugin presents itself to the kubelet.

    A `pod_uid` allows rolling updates. Running calls may continue for `grace_s` seconds after stop(). The plugin checks
    its own and other drivers' sockets every `guard_s` seconds.
    """

    driver: str
    registry_dir: Path = REGISTRY_DIR
    plugins_dir: Path = PLUGINS_DIR
    pod_uid: str | None = None
    health_address: str | None = None
    grace_s: float = 25.0
    guard_s: float = 5.0

    @property
    def plugin_dir(self) -> Path:
        return self.plugins_dir / self.driver


class KubeletPlugin:
    """Serves the kubelet from start() to stop(); cannot be restarted."""

    def __init__(
        self,
        settings: PluginSettings,
        claims: dra.ClaimCalls,
        owner: PluginOwner,
        watch_device_health: DeviceHealthWatch | None = None,
    ) -> None:
        self.settings = settings
        self.sockets: SocketPaths = socket_paths(
            settings.driver,
            registry_dir=settings.registry_dir,
            plugin_dir=settings.plugin_dir,
            pod_uid=settings.pod_uid,
        )
        versions: tuple[str, ...] = (dra.V1, dra.V1BETA1)
        methods = dra.DraService(claims).methods()
        self._started_at: float | None = None
        self._others = SocketWatch(settings.driver, settings.registry_dir, settings.plugin_dir)
        if watch_device_health is not None:
            versions += HEALTH_VERSIONS
            methods |= _health_methods(watch_device_health)
        self.registrar = Registrar(settings.driver, self.sockets.dra, versions, owner)
        # Either socket identifies the instance.
        self._server = SocketServer(
            {"dra": self.sockets.dra, "registration": self.sockets.registrar},
            methods | self.registrar.methods(),
        )
        self.liveness = Liveness(self._dial_self)
        self._health = (
            HealthServer(settings.health_address, self.liveness, owner.is_ready)
            if settings.health_address
            else None
        )
        self._owner = owner
        self._stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._guard = BackgroundWorker("socket-guard", self._watch_sockets, lambda _: 0.0)

    @property
    def status(self) -> RegistrationStatus | None:
        return self.registrar.status

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        """Start both servers. The registration socket appears last, when everything else responds.

        Raises: InvalidConfigError, StateError; stops all parts that it started.
        """
        ensure_registry_dir(self.settings.registry_dir)
        ensure_plugin_dir(self.settings.plugin_dir)
        try:
            if self._health is not None:
                self._health.start()
            self._server.start()
        except BaseException:
            self.stop(0)
            raise
        self._started_at = time.monotonic()
        self._guard.start()

    def problems(self) -> Sequence[NodeProblem]:
        return [*self._registration_problems(), *self._others.problems()]

    def stop(self, grace_s: float | None = None) -> None:
        """Stop the kubelet's calls, then health, and wait for both. Safe to call twice."""
        self._stopping.set()
        with self._stop_lock:
            self._server.stop(self.settings.grace_s if grace_s is None else grace_s)
            if self._health is not None:
                self._health.stop()
        self._guard.stop()

    def withdraw(self) -> None:
        """Remove the sockets, so that the kubelet calls another process of this plugin. Probes are still answered."""
        self._stopping.set()
        with self._stop_lock:
            self._server.stop(_WITHDRAWAL_GRACE_S)

    def _registration_problems(self) -> list[NodeProblem]:
        if self._started_at is None or self.stopping:
            return []
        fault, status = self._server.fault() or self.liveness.lasting_fault(_UNREACHABLE_FOR_S), self.status
        waited_s = time.monotonic() - self._started_at
        see = f"`journalctl -u kubelet | grep -i {self.settings.driver}` on the node shows what the kubelet does"
        if fault is not None:
            text = f"The kubelet cannot reach the plugin: {fault}"
        elif status is not None and not status.registered:
            text = f"The kubelet refused to register the plugin: {status.error}; {see}"
        elif status is None and waited_s >= _REGISTERED_WITHIN_S:
            text = (
                f"The kubelet has still not registered the plugin after {waited_s:.0f} s; check that "
                f"{self.settings.registry_dir} is the registry directory of a running kubelet: {see}"
            )
        else:
            return []
        return [NodeProblem("not-registered", text)]

    def _dial_self(self) -> str | None:
        fault = None if self._started_at is None or self.stopping else dial(self.sockets.registrar)
        # The socket may have been withdrawn during the call.
        return None if self.stopping else fault

    def _watch_sockets(self) -> float:
        if self._guard.pause(self.settings.guard_s):
            return 0.0
        fault = self._server.fault()
        if fault is not None and not self.stopping:
            error = FatalError(f"{fault}; restart the plugin")
            _log.critical("kubelet_server_died", error=str(error))
            self._guard.retire()
            self._owner.plugin_died(error)
        elif not self.stopping:
            self.liveness.fault(_DIAL_EVERY_S)
            self._others.look()
        return 0.0


def _health_methods(watch: DeviceHealthWatch) -> Methods:
    methods = [f"{version}/NodeWatchResources" for version in HEALTH_VERSIONS]
    return {f"/{method}": streaming(method, watch, pb.NodeWatchResourcesRequest) for method in methods}
