"""The registration service: tells the kubelet who we are, and keeps the kubelet's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from dra_driver.kubelet.pb import registration_pb2 as pb
from dra_driver.kubelet.rpc import Methods, RpcError, unary

PLUGIN_TYPE = "DRAPlugin"
GET_INFO = "/pluginregistration.Registration/GetInfo"
NOTIFY = "/pluginregistration.Registration/NotifyRegistrationStatus"
SERVED_BY_KEY, SERVED_BY = "served-by", "gpu-dra-driver"
"""Metadata of each answer to GetInfo. Other instances of this plugin recognise it by this; the kubelet ignores it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """The kubelet's last answer; `error` is its reason if it refused the plugin."""

    registered: bool
    error: str = ""


class Registrar:
    """Answers the plugin watcher as long as the process runs: a restarted kubelet asks again.

    Of `versions` the kubelet takes the first of each service that it knows.
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
        self.status: RegistrationStatus | None = None
        """The kubelet's last answer; None before the first one."""

    def methods(self) -> Methods:
        """The methods of the service by their paths."""
        return self.get_info() | {
            NOTIFY: unary("NotifyRegistrationStatus", self._notify, pb.RegistrationStatus),
        }

    def get_info(self) -> Methods:
        """GetInfo alone. The DRA socket answers it too, so that an instance is recognised by either socket."""
        return {GET_INFO: unary("GetInfo", self._get_info, pb.InfoRequest)}

    def _get_info(self, _request: pb.InfoRequest, context: Any) -> pb.PluginInfo:
        context.set_trailing_metadata(((SERVED_BY_KEY, SERVED_BY),))
        return self._info

    def _notify(self, request: pb.RegistrationStatus, _context: Any) -> pb.RegistrationStatusResponse:
        status = RegistrationStatus(request.plugin_registered, request.error)
        changed, self.status = status != self.status, status
        if status.registered:
            _log.info("plugin_registered", driver=self._info.name)
        if changed and self._on_status is not None:
            self._on_status(status)
        if not status.registered:
            raise RpcError(grpc.StatusCode.UNKNOWN, f"failed registration process: {status.error}")
        return pb.RegistrationStatusResponse()
