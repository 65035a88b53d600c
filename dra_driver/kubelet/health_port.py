"""gRPC health for the kubelet's probes, on TCP.

""  "liveness"   our own two sockets answer
"startup"        they have answered once
"readiness"      what the application answers
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2 as pb

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet.liveness import CACHED_S, Liveness
from dra_driver.kubelet.rpc import Methods, RpcError, streaming, unary
from dra_driver.kubelet.serving import GrpcServer

SERVICE = "grpc.health.v1.Health"
MAX_CALLS = 64
"""This port is open to the pod network."""
MAX_REQUEST_BYTES = 1024
"""The name of a service."""

_log = structlog.get_logger(__name__)
_MAX_WATCHERS = 4
_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", 256),  # more are turned away
    ("grpc.max_connection_age_ms", 60_000),  # also of a caller that ends no request or reads no answer
    ("grpc.max_connection_age_grace_ms", 5_000),
)
_Status = pb.HealthCheckResponse.ServingStatus


class HealthServer:
    """Serves grpc.health.v1 at a TCP address; `ready` answers readiness."""

    def __init__(self, address: str, liveness: Liveness, ready: Callable[[], bool]) -> None:
        self._address = address
        self._ready = ready
        self._watchers = threading.Semaphore(_MAX_WATCHERS)
        self._services: dict[str, Callable[[], bool]] = {
            "": lambda: liveness.fault() is None,
            "liveness": lambda: liveness.fault() is None,
            "startup": lambda: liveness.start_fault() is None,
            "readiness": self._is_ready,
        }
        self._server = GrpcServer(
            "health", self._methods(), calls=MAX_CALLS, request_bytes=MAX_REQUEST_BYTES, options=_OPTIONS
        )
        self.port = 0

    def start(self) -> None:
        """Raises: InvalidConfigError if the server cannot listen on the address."""
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

    def _is_ready(self) -> bool:
        try:
            return self._ready()
        except Exception:  # noqa: BLE001 - foreign callback
            _log.exception("readiness_failed")
            return False

    def _status(self, service: str) -> pb.HealthCheckResponse:
        check = self._services.get(service)
        if check is None:
            return pb.HealthCheckResponse(status=_Status.SERVICE_UNKNOWN)
        return pb.HealthCheckResponse(status=_Status.SERVING if check() else _Status.NOT_SERVING)

    def _check(self, request: pb.HealthCheckRequest, _context: Any) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"service {request.service!r} is not known")
        return self._status(request.service)

    def _list(self, _request: pb.HealthListRequest, _context: Any) -> pb.HealthListResponse:
        return pb.HealthListResponse(statuses={name: self._status(name) for name in self._services})

    def _watch(
        self, request: pb.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.HealthCheckResponse]:
        if not self._watchers.acquire(blocking=False):
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {_MAX_WATCHERS} watchers")
        try:
            ended = threading.Event()
            if not context.add_callback(ended.set):
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

    def _methods(self) -> Methods:
        return {
            f"/{SERVICE}/Check": unary("Check", self._check, pb.HealthCheckRequest),
            f"/{SERVICE}/List": unary("List", self._list, pb.HealthListRequest),
            f"/{SERVICE}/Watch": streaming("Watch", self._watch, pb.HealthCheckRequest),
        }
