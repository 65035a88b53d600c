"""Checks that our own two sockets respond, and serves gRPC health for the kubelet's probes.

Liveness does not fail for bad GPUs or an unreachable API server, because a restart would not help: its calls name no
claim. The health service implements Check, but not Watch or List.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet import dra
from dra_driver.kubelet.grpc_server import GrpcServer, Methods, RpcError, call_method, error_text, unary
from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2
from dra_driver.kubelet.registration import GET_INFO

DIAL_TIMEOUT_S = 2.5
CACHED_S = 1.0

_log = structlog.get_logger(__name__)
_PREPARE = dra.method_path(dra.V1, "NodePrepareResources")
SERVICE = "grpc.health.v1.Health"
MAX_PROBES = 64
"""Limited, because the port is open to the pod network."""
MAX_PROBE_BYTES = 1024

_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", 256),  # excess connections are refused
    ("grpc.max_connection_age_ms", 60_000),  # closes a connection even if its peer never ends a request
    ("grpc.max_connection_age_grace_ms", 5_000),
)
_Status = health_pb2.HealthCheckResponse.ServingStatus


def dial(registrar: Path, timeout_s: float = DIAL_TIMEOUT_S) -> str | None:
    """Call both sockets as the kubelet does; returns what is wrong."""
    until = time.monotonic() + timeout_s
    nothing, answer = dra_v1_pb2.NodePrepareResourcesRequest(), dra_v1_pb2.NodePrepareResourcesResponse
    name, path = "registration", registrar
    try:
        info = call_method(
            path, GET_INFO, registration_pb2.InfoRequest(), registration_pb2.PluginInfo, timeout_s
        )
        name, path = "DRA", Path(info.endpoint)
        call_method(path, _PREPARE, nothing, answer, until - time.monotonic())
    except grpc.RpcError as error:
        return f"the {name} socket {path} does not answer ({error.code().name}: {error_text(error.details() or '')})"
    return None


class Liveness:
    """Whether our sockets respond. Callers during a check or within `max_age_s` seconds after it share its result."""

    def __init__(self, dial: Callable[[], str | None], *, max_age_s: float = CACHED_S) -> None:
        self._dial = dial
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._checked_at: float | None = None
        self._fault: str | None = None
        self._failing_since: float | None = None
        self._started = False

    def fault(self, max_age_s: float | None = None) -> str | None:
        """Return why the kubelet cannot reach us, as a sentence with the remedy."""
        most_s = self._max_age_s if max_age_s is None else max_age_s
        with self._lock:
            if self._checked_at is None or time.monotonic() - self._checked_at >= most_s:
                before, self._fault = self._fault, self._check()
                self._checked_at = time.monotonic()
                self._failing_since = None if self._fault is None else self._failing_since or self._checked_at
                self._started = self._started or self._fault is None
                if before is None and self._fault is not None:
                    _log.warning("liveness_failed", reason=self._fault)
                elif before is not None and self._fault is None:
                    _log.info("liveness_restored", before=before)
            return self._fault

    def lasting_fault(self, lasting_s: float) -> str | None:
        """Return the last fault if no check has succeeded for `lasting_s` seconds. Runs no check itself."""
        fault, since = self._fault, self._failing_since
        return fault if since is not None and time.monotonic() - since >= lasting_s else None

    def start_fault(self) -> str | None:
        """Return the fault until the sockets have responded once; then always None."""
        return None if self._started else self.fault()

    def _check(self) -> str | None:
        try:
            fault = self._dial()
        except Exception as error:  # noqa: BLE001 - any error here is a fault
            fault = error_text(error)
        if fault is None:
            return None
        return f"{fault}; if this lasts, the kubelet restarts the plugin; SIGUSR2 shows what its threads wait for"


class HealthServer:
    def __init__(self, address: str, liveness: Liveness, ready: Callable[[], bool]) -> None:
        self._address = address
        self._services: dict[str, Callable[[], bool]] = {
            "": lambda: liveness.fault() is None,
            "liveness": lambda: liveness.fault() is None,
            "startup": lambda: liveness.start_fault() is None,
            "readiness": ready,
        }
        self._server = GrpcServer(
            "health", self._methods(), calls=MAX_PROBES, request_bytes=MAX_PROBE_BYTES, options=_OPTIONS
        )
        self.port = 0

    def start(self) -> None:
        """Raise InvalidConfigError if the server cannot listen on the address."""
        try:
            self.port = self._server.bind(self._address)
        except RuntimeError as error:
            raise InvalidConfigError(
                f"health service cannot listen on {self._address}: another process uses the address, or it is not an "
                "address of this node; choose another --healthcheck-port"
            ) from error
        self._server.start()
        _log.info("health_served", address=self._address, port=self.port)

    def stop(self) -> None:
        self._server.stop(0)

    def _check(self, request: health_pb2.HealthCheckRequest, _context: Any) -> health_pb2.HealthCheckResponse:
        check = self._services.get(request.service)
        if check is None:
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"service {request.service!r} is not known")
        return health_pb2.HealthCheckResponse(status=_Status.SERVING if check() else _Status.NOT_SERVING)

    def _methods(self) -> Methods:
        return {
            f"/{SERVICE}/Check": unary("Check", self._check, health_pb2.HealthCheckRequest),
        }
