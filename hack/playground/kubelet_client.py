"""The connection of the playground's kubelet to a registered plugin."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import grpc
from grpc._cython.cygrpc import ConnectivityState

from dra_driver.kubelet.pb import dra_v1_pb2, dra_v1beta1_pb2
from dra_driver.kubelet.pb import registration_pb2 as registration
from dra_driver.model.claim import (
    ClaimRef,
    Failed,
    Prepared,
    PreparedDevice,
    PrepareOutcome,
    UnprepareOutcome,
)

DRA_APIS: Mapping[str, ModuleType] = {"v1.DRAPlugin": dra_v1_pb2, "v1beta1.DRAPlugin": dra_v1beta1_pb2}

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a new connection, even to a path that was used before
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # the time limit for connecting; 20 s in grpc-go
    ("grpc.max_reconnect_backoff_ms", 500),
)


class KubeletError(Exception):
    """An error whose text the kubelet would write into the pod's event. `code` is the gRPC status of a failed call."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code


def open_channel(path: Path) -> Any:
    """Return a gRPC channel to a Unix socket. It connects at its first use."""
    return grpc.insecure_channel("unix:" + quote(str(path), safe="/"), options=_OPTIONS)


def method_path(module: ModuleType, service: str, method: str) -> str:
    """Return the full name of a gRPC method, from its proto."""
    return f"/{module.DESCRIPTOR.services_by_name[service].full_name}/{method}"


def call_method(
    channel: Any, path: str, request: Any, response: Any, timeout_s: float, *, wait_for_ready: bool = False
) -> Any:
    """Call a gRPC method, and return its response. Raises: KubeletError with the driver's status and text."""
    call = channel.unary_unary(path, type(request).SerializeToString, response.FromString)
    try:
        return call(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise KubeletError(f"{error.details()}", error.code()) from error
    except ValueError as error:  # the channel was closed during the call
        raise KubeletError(f"connection closed: {error}", grpc.StatusCode.CANCELLED) from error


def registration_call(channel: Any, method: str, request: Any, response: Any, timeout_s: float) -> Any:
    """Call a method of the registration service."""
    return call_method(
        channel, method_path(registration, "Registration", method), request, response, timeout_s
    )


class Instance:
    """A registered endpoint of a driver. `socket` is its registration socket; `version` is the DRA API in use."""

    def __init__(self, driver: str, socket: Path, endpoint: Path, version: str) -> None:
        self.driver = driver
        self.socket = socket
        self.endpoint = endpoint
        self.version = version
        self._lock = threading.Lock()
        self.closed = False
        self._channel = open_channel(endpoint)
        self.look()

    @property
    def connected(self) -> bool:
        """Whether the endpoint is connected now."""
        return self.look()

    def look(self) -> bool:
        """Whether the endpoint is connected. If not, start to connect; therefore, call this from time to time.

        gRPC's public alternative, subscribe(), starts a thread per channel, which fails with a ValueError if the
        channel is closed at the wrong moment.
        """
        with self._lock:
            if self.closed:
                return False
            state = self._channel._channel.check_connectivity_state(True)
            return bool(state == ConnectivityState.ready)

    def request(self, method: str, claims: Sequence[ClaimRef]) -> Any:
        """Return the request message of NodePrepareResources or NodeUnprepareResources."""
        api = DRA_APIS[self.version]
        wire = [api.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in claims]
        return getattr(api, f"{method}Request")(claims=wire)

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Send the request and return the response; wait for a connection within the deadline. Raises: KubeletError."""
        api = DRA_APIS[self.version]
        path = method_path(api, "DRAPlugin", method)
        response = getattr(api, f"{method}Response")
        return call_method(self._channel, path, request, response, timeout_s, wait_for_ready=True)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._channel.close()


def prepare_outcomes(response: Any) -> dict[str, PrepareOutcome]:
    """Return the outcomes in a NodePrepareResources response. The devices of an entry with an error are ignored."""
    return {
        uid: Failed(entry.error) if entry.error else Prepared(tuple(map(_device, entry.devices)))
        for uid, entry in response.claims.items()
    }


def unprepare_outcomes(response: Any) -> dict[str, UnprepareOutcome]:
    """Return the outcomes in a NodeUnprepareResources response."""
    return {uid: Failed(entry.error) if entry.error else None for uid, entry in response.claims.items()}


def check_entries(method: str, claims: Sequence[ClaimRef], response: Any) -> None:
    """Raise KubeletError unless the response has exactly one entry for each claim."""
    asked = {ref.uid for ref in claims}
    if unknown := sorted(set(response.claims) - asked):
        raise KubeletError(f"{method} returned a result for unknown claim UID {unknown[0]}")
    if skipped := len(asked - set(response.claims)):
        raise KubeletError(f"{method} skipped {skipped} ResourceClaims")


def _device(wire: Any) -> PreparedDevice:
    shared = "share_id" in wire.DESCRIPTOR.fields_by_name and wire.HasField("share_id")
    return PreparedDevice(
        requests=tuple(wire.request_names),
        pool=wire.pool_name,
        device=wire.device_name,
        cdi_ids=tuple(wire.cdi_device_ids),
        share_id=wire.share_id if shared else None,
    )
