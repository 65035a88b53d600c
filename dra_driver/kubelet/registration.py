"""The registration service: tells the kubelet who we are, and keeps the kubelet's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet.grpc_server import Caller, Method
from dra_driver.kubelet.grpc_wire import RpcError, Status
from dra_driver.kubelet.pb import registration_pb2 as pb
from dra_driver.kubelet.rpc import unary_method

SERVICE = "pluginregistration.Registration"
PLUGIN_TYPE = "DRAPlugin"
V1 = "v1.DRAPlugin"
V1BETA1 = "v1beta1.DRAPlugin"
HEALTH_V1 = "v1.DRAResourceHealth"
HEALTH_V1ALPHA1 = "v1alpha1.DRAResourceHealth"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """The kubelet's last answer; `error` is its reason if it refused the plugin."""

    registered: bool
    error: str = ""


def supported_versions(*, v1: bool, v1beta1: bool, device_health: bool) -> tuple[str, ...]:
    """Service names in order of preference: the kubelet takes the first one that it knows.

    Raises: InvalidConfigError if no DRA service is wanted.
    """
    versions = [name for name, served in ((V1, v1), (V1BETA1, v1beta1)) if served]
    if not versions:
        raise InvalidConfigError("no supported DRA gRPC API is enabled; serve v1, v1beta1 or both")
    if device_health:
        versions += [HEALTH_V1, HEALTH_V1ALPHA1]
    return tuple(versions)


class Registrar:
    """Answers the plugin watcher as long as the process runs: a restarted kubelet asks again.

    `get_info_error` and `notify_error` make the calls fail with that text; they are there for tests.
    """

    def __init__(
        self,
        driver: str,
        endpoint: Path,
        versions: tuple[str, ...],
        on_status: Callable[[RegistrationStatus], None] | None = None,
    ) -> None:
        self._info = pb.PluginInfo(
            type=PLUGIN_TYPE, name=driver, endpoint=str(endpoint), supported_versions=versions
        )
        self._on_status = on_status
        self._status: RegistrationStatus | None = None
        self.get_info_error: str | None = None
        self.notify_error: str | None = None

    @property
    def status(self) -> RegistrationStatus | None:
        """The kubelet's last answer; None before the first one."""
        return self._status

    def methods(self) -> dict[str, Method]:
        """The methods of the service by their paths."""
        return {
            f"/{SERVICE}/GetInfo": unary_method("GetInfo", self._get_info, pb.InfoRequest),
            f"/{SERVICE}/NotifyRegistrationStatus": unary_method(
                "NotifyRegistrationStatus", self._notify, pb.RegistrationStatus
            ),
        }

    def _get_info(self, _request: pb.InfoRequest, _caller: Caller) -> pb.PluginInfo:
        if self.get_info_error is not None:
            raise RpcError(Status.UNKNOWN, self.get_info_error)
        return self._info

    def _notify(self, request: pb.RegistrationStatus, _caller: Caller) -> pb.RegistrationStatusResponse:
        if self.notify_error is not None:
            raise RpcError(Status.UNKNOWN, self.notify_error)
        status = RegistrationStatus(request.plugin_registered, request.error)
        changed, self._status = status != self._status, status
        if status.registered:
            _log.info("plugin_registered", driver=self._info.name)
        if changed and self._on_status is not None:
            try:
                self._on_status(status)
            except Exception:  # noqa: BLE001 - foreign callback
                _log.exception("registration_callback_failed")
        if not status.registered:
            raise RpcError(Status.UNKNOWN, f"failed registration process: {status.error}")
        return pb.RegistrationStatusResponse()
