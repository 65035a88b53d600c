"""gRPC health for the kubelet's probes, on TCP.

    ""  "liveness"   our own two sockets answer, when they are dialled as the kubelet dials them
    "startup"        they have answered once
    "readiness"      what the application answers

Liveness sees what the kubelet sees: it fails if a socket file was removed or a server is stuck. It does not fail for
bad GPUs or an API server that does not answer, because a restart would not help: the call names no claim, so it needs
neither.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet import registration, v1, v1beta1
from dra_driver.kubelet.grpc_client import call
from dra_driver.kubelet.grpc_server import Caller, GrpcServer, Limits, Method
from dra_driver.kubelet.grpc_wire import RpcError, Status
from dra_driver.kubelet.pb import dra_v1_pb2 as dra_pb
from dra_driver.kubelet.pb import grpc_health_pb2 as pb
from dra_driver.kubelet.pb import registration_pb2
from dra_driver.kubelet.rpc import error_text, stream_method, unary_method
from dra_driver.kubelet.workers import Workers

SERVICE = "grpc.health.v1.Health"
DIAL_TIMEOUT_S = 2.5
DIALS = 3
DIAL_PAUSE_S = 0.25
CACHED_S = 1.0

_log = structlog.get_logger(__name__)
_MAX_WATCHERS = 4
_MAX_WORKERS = 8
_MAX_CALLS = 64
"""This port is open to the pod network; a client that floods it must not fill a queue."""
_MAX_CONNECTIONS = 64
_IDLE_S = 60.0
"""A prober that keeps its connection asks more often."""
_MAX_REQUEST_BYTES = 1024
"""The name of a service."""
_MAX_ANSWER_BYTES = 4096
_DRA_SERVICES = {registration.V1: v1.SERVICE, registration.V1BETA1: v1beta1.SERVICE}
_ServingStatus = pb.HealthCheckResponse.ServingStatus


def dial(registrar: Path, timeout_s: float = DIAL_TIMEOUT_S) -> str | None:
    """Asks the registration socket for our endpoint, and sends that an empty Prepare. Returns what is wrong; None if
    both answer."""
    until = time.monotonic() + timeout_s
    dialled = "registration", registrar
    try:
        info = call(
            registrar,
            f"/{registration.SERVICE}/GetInfo",
            registration_pb2.InfoRequest(),
            registration_pb2.PluginInfo,
            timeout_s,
        )
        service = next(_DRA_SERVICES[name] for name in info.supported_versions if name in _DRA_SERVICES)
        dialled = "DRA", Path(info.endpoint)
        call(
            dialled[1],
            f"/{service}/NodePrepareResources",
            dra_pb.NodePrepareResourcesRequest(),
            dra_pb.NodePrepareResourcesResponse,
            max(0.0, until - time.monotonic()),
        )
    except RpcError as error:
        name, path = dialled
        return f"the {name} socket {path} does not answer ({error.code.name}: {error_text(error)})"
    return None


class Liveness:
    """Whether our sockets answer.

    A failed check is repeated: only `dials` failures in a row are a fault, so a busy moment causes no restart. They
    take at most eight seconds, which is less than a probe waits. Callers that arrive during a check or within
    `max_age_s` seconds after it share its answer. `dial` returns what is wrong, or None.
    """

    def __init__(
        self,
        dial: Callable[[], str | None],
        *,
        dials: int = DIALS,
        pause_s: float = DIAL_PAUSE_S,
        max_age_s: float = CACHED_S,
    ) -> None:
        self._dial = dial
        self._dials = dials
        self._pause_s = pause_s
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._checked_at: float | None = None
        self._fault: str | None = None
        self._started = False

    def fault(self) -> str | None:
        """Why the kubelet cannot reach us, as a sentence with the remedy; None if it can."""
        with self._lock:
            if self._checked_at is None or time.monotonic() - self._checked_at >= self._max_age_s:
                before, self._fault = self._fault, self._check()
                self._checked_at = time.monotonic()
                self._started = self._started or self._fault is None
                _tell(before, self._fault)
            return self._fault

    def start_fault(self) -> str | None:
        """As `fault` until the sockets have answered once; then always None."""
        return None if self._started else self.fault()

    def _check(self) -> str | None:
        fault = self._dial_once()
        for _ in range(1, self._dials):
            if fault is None:
                return None
            time.sleep(self._pause_s)
            fault = self._dial_once()
        if fault is None:
            return None
        return (
            f"{fault}; if that lasts, the kubelet restarts the driver; SIGUSR2 shows what the driver's threads "
            "wait for"
        )

    def _dial_once(self) -> str | None:
        try:
            return self._dial()
        except Exception as error:  # noqa: BLE001 - any error here is a fault
            return error_text(error)


def _tell(before: str | None, fault: str | None) -> None:
    if fault is None:
        if before is not None:
            _log.info("liveness_restored", before=before)
    elif before is None:
        _log.warning("liveness_failed", reason=fault)


class HealthServer:
    """Serves grpc.health.v1 at a TCP address; `ready` answers readiness."""

    def __init__(self, address: str, liveness: Liveness, ready: Callable[[], bool]) -> None:
        self._address = address
        self._liveness = liveness
        self._ready = ready
        self._watchers = threading.Semaphore(_MAX_WATCHERS)
        self._services = {
            "": self._is_live,
            "liveness": self._is_live,
            "startup": self._is_started,
            "readiness": self._is_ready,
        }
        limits = Limits(_MAX_CONNECTIONS, _MAX_CALLS, _MAX_REQUEST_BYTES, _MAX_ANSWER_BYTES, _IDLE_S)
        self._server = GrpcServer(self._methods(), Workers("health", limit=_MAX_WORKERS), limits)
        self.port = 0

    def start(self) -> None:
        """Raises: InvalidConfigError if the server cannot listen on the address."""
        try:
            bound = _bound(self._address)
            self._server.start(bound)
        except (OSError, ValueError) as error:
            raise InvalidConfigError(
                f"health service cannot listen on {self._address}: another process uses the address, or it is not an "
                "address of this node; choose another --healthcheck-port"
            ) from error
        self.port = bound.getsockname()[1]
        _log.info("health_served", address=self._address, port=self.port)

    def stop(self) -> None:
        self._server.stop(0)

    def _is_live(self) -> bool:
        return self._liveness.fault() is None

    def _is_started(self) -> bool:
        return self._liveness.start_fault() is None

    def _is_ready(self) -> bool:
        try:
            return self._ready()
        except Exception:  # noqa: BLE001 - foreign callback
            _log.exception("readiness_failed")
            return False

    def _status(self, service: str) -> pb.HealthCheckResponse:
        check = self._services.get(service)
        if check is None:
            return pb.HealthCheckResponse(status=_ServingStatus.SERVICE_UNKNOWN)
        return pb.HealthCheckResponse(
            status=_ServingStatus.SERVING if check() else _ServingStatus.NOT_SERVING
        )

    def _check(self, request: pb.HealthCheckRequest, _caller: Caller) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise RpcError(Status.NOT_FOUND, f"service {request.service!r} is not known")
        return self._status(request.service)

    def _list(self, _request: pb.HealthListRequest, _caller: Caller) -> pb.HealthListResponse:
        return pb.HealthListResponse(statuses={name: self._status(name) for name in self._services})

    def _watch(self, request: pb.HealthCheckRequest, caller: Caller) -> Iterator[pb.HealthCheckResponse]:
        if not self._watchers.acquire(blocking=False):
            raise RpcError(Status.RESOURCE_EXHAUSTED, f"more than {_MAX_WATCHERS} watchers")
        try:
            ended = threading.Event()
            if not caller.add_callback(ended.set):
                return
            sent: Any = None
            while not ended.is_set():
                status = self._status(request.service)
                if status != sent:
                    yield status
                    sent = status
                ended.wait(CACHED_S)
        finally:
            self._watchers.release()

    def _methods(self) -> dict[str, Method]:
        return {
            f"/{SERVICE}/Check": unary_method("Check", self._check, pb.HealthCheckRequest),
            f"/{SERVICE}/List": unary_method("List", self._list, pb.HealthListRequest),
            f"/{SERVICE}/Watch": stream_method("Watch", self._watch, pb.HealthCheckRequest),
        }


def _bound(address: str) -> socket.socket:
    """A socket that listens on `host:port`, for IPv4 and IPv6 where the host is empty or `[::]`. Raises: OSError;
    ValueError if the port is no number."""
    host, _, port = address.rpartition(":")
    host = "" if host == "[::]" else host.strip("[]")
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # no interface has IPv6
                raise
    return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
