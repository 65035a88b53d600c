"""A registered plugin as the playground's kubelet sees it: one connection for its calls."""

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
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, also to a path that was used before
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long a connection may take; grpc-go gives it 20 s
    ("grpc.max_reconnect_backoff_ms", 500),
)


class KubeletError(Exception):
    """What the kubelet would write into the pod's event; `code` is the gRPC status, if there was a call."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code


def open_channel(path: Path) -> Any:
    """A gRPC channel to a Unix socket; connects when first used."""
    return grpc.insecure_channel("unix:" + quote(str(path), safe="/"), options=_OPTIONS)


def method_path(module: ModuleType, service: str, method: str) -> str:
    """The full gRPC method name, from the proto itself."""
    return f"/{module.DESCRIPTOR.services_by_name[service].full_name}/{method}"


def call_method(
    channel: Any, path: str, request: Any, response: Any, timeout_s: float, *, wait_for_ready: bool = False
) -> Any:
    """Raises: KubeletError with the status and the text of the driver."""
    call = channel.unary_unary(path, type(request).SerializeToString, response.FromString)
    try:
        return call(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise KubeletError(f"{error.details()}", error.code()) from error
    except ValueError as error:  # the channel was closed during the call
        raise KubeletError(f"connection closed: {error}", grpc.StatusCode.CANCELLED) from error


def registration_call(channel: Any, method: str, request: Any, response: Any, timeout_s: float) -> Any:
    """One call of the registration service."""
    return call_method(
        channel, method_path(registration, "Registration", method), request, response, timeout_s
    )


class Instance:
    """One endpoint of one driver. `socket` is its registration socket, `version` the DRA API in use."""

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
        """Whether there is a connection now."""
        return self.look()

    def look(self) -> bool:
        """Whether there is a connection. If not, starts to connect, so it must be called from time to time.

        gRPC's public alternative, subscribe(), starts a thread per channel that dies of a ValueError if the
        channel is closed at the wrong moment.
        """
        with self._lock:
            if self.closed:
                return False
            state = self._channel._channel.check_connectivity_state(True)
            return bool(state == ConnectivityState.ready)

    def request(self, method: str, claims: Sequence[ClaimRef]) -> Any:
        """The request message of NodePrepareResources or NodeUnprepareResources."""
        api = DRA_APIS[self.version]
        wire = [api.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in claims]
        return getattr(api, f"{method}Request")(claims=wire)

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Sends it; waits for a connection within the deadline. Raises: KubeletError."""
        api = DRA_APIS[self.version]
        path = method_path(api, "DRAPlugin", method)
        response = getattr(api, f"{method}Response")
        return call_method(self._channel, path, request, response, timeout_s, wait_for_ready=True)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._channel.close()


def prepare_outcomes(response: Any) -> dict[str, PrepareOutcome]:
    """Entries of a NodePrepareResources answer; devices do not count when there is an error."""
    return {
        uid: Failed(entry.error) if entry.error else Prepared(tuple(map(_device, entry.devices)))
        for uid, entry in response.claims.items()
    }


def unprepare_outcomes(response: Any) -> dict[str, UnprepareOutcome]:
    """Entries of a NodeUnprepareResources answer."""
    return {uid: Failed(entry.error) if entry.error else None for uid, entry in response.claims.items()}


def check_entries(method: str, claims: Sequence[ClaimRef], response: Any) -> None:
    """Raises: KubeletError unless there is exactly one entry for each claim."""
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
