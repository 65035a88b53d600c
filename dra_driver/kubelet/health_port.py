"""gRPC health for the kubelet's probes, on TCP. They check, and do not watch or list.

""  "liveness"   our own two sockets answer
"startup"        they have answered once
"readiness"      what the application answers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2 as pb

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet.liveness import Liveness
from dra_driver.kubelet.rpc import Methods, RpcError, unary
from dra_driver.kubelet.serving import GrpcServer

SERVICE = "grpc.health.v1.Health"
MAX_CALLS = 64
"""This port is open to the pod network."""
MAX_REQUEST_BYTES = 1024
"""The name of a service."""

_log = structlog.get_logger(__name__)
_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", 256),  # more are turned away
    ("grpc.max_connection_age_ms", 60_000),  # also of a caller that ends no request or reads no answer
    ("grpc.max_connection_age_grace_ms", 5_000),
)
_Status = pb.HealthCheckResponse.ServingStatus


class HealthServer:
    """Serves grpc.health.v1 at a TCP address; `ready` says whether the plugin is ready."""

    def __init__(self, address: str, liveness: Liveness, ready: Callable[[], bool]) -> None:
        self._address = address
        self._services: dict[str, Callable[[], bool]] = {
            "": lambda: liveness.fault() is None,
            "liveness": lambda: liveness.fault() is None,
            "startup": lambda: liveness.start_fault() is None,
            "readiness": ready,
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

    def _check(self, request: pb.HealthCheckRequest, _context: Any) -> pb.HealthCheckResponse:
        check = self._services.get(request.service)
        if check is None:
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"service {request.service!r} is not known")
        return pb.HealthCheckResponse(status=_Status.SERVING if check() else _Status.NOT_SERVING)

    def _methods(self) -> Methods:
        return {
            f"/{SERVICE}/Check": unary("Check", self._check, pb.HealthCheckRequest),
        }
