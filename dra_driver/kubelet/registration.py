"""Registration with the kubelet, and detection of other drivers with our name on this node.

The kubelet sends claims to whichever program last registered under a name. So this module finds the owner of each
socket in the kubelet's registry directory and in the driver's plugin directory. Our own response has metadata, and an
endpoint in our plugin directory. A socket that cannot be called may be ours (SELinux separates unprivileged pods), so
it is reported only if that lasts longer than a rolling update. The form of its name proves nothing: NVIDIA's DRA driver
uses the same.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import grpc
import structlog

from dra_driver.errors import FatalError
from dra_driver.kubelet.grpc_server import Methods, RpcError, call_with_metadata, error_text, unary
from dra_driver.kubelet.pb import registration_pb2 as pb
from dra_driver.kubelet.sockets import identity, listening
from dra_driver.model.dataclass import dataclass
from dra_driver.model.problems import NodeProblem

PLUGIN_TYPE = "DRAPlugin"
GET_INFO = "/pluginregistration.Registration/GetInfo"
NOTIFY = "/pluginregistration.Registration/NotifyRegistrationStatus"
SERVED_BY_KEY, SERVED_BY = "served-by", "gpu-dra-driver"
"""Metadata of GetInfo by which other instances recognise this plugin."""
_log = structlog.get_logger(__name__)

_QUERY_S = 1.0
_SILENT_LOOKS = 24
"""Two minutes: longer than two pods of this plugin run side by side."""

Origin = Literal["ours", "foreign", "elsewhere", "silent", "dead"]
"""An instance of this plugin, another driver with our name, a plugin with another name, an unknown program, or no
process.
"""


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """The kubelet's last answer."""

    registered: bool
    error: str = ""


class PluginOwner(Protocol):
    """Runs the plugin. Called by the plugin's threads; may stop the plugin."""

    def is_ready(self) -> bool:
        """Return the result of readiness probes."""

    def registration_changed(self, status: RegistrationStatus) -> None:
        """Note the kubelet's answer."""

    def plugin_died(self, error: FatalError) -> None:
        """Note that a server has failed."""


class Registrar:
    """Answers the kubelet's plugin watcher as long as the process runs, because a restarted kubelet calls again.

    The kubelet uses the first of `versions` that it supports, for each service.
    """

    def __init__(
        self,
        driver: str,
        endpoint: Path,
        versions: tuple[str, ...],
        owner: PluginOwner,
    ) -> None:
        self._info = pb.PluginInfo(
            type=PLUGIN_TYPE, name=driver, endpoint=str(endpoint), supported_versions=versions
        )
        self._owner = owner
        self.status: RegistrationStatus | None = None

    def methods(self) -> Methods:
        return {
            GET_INFO: unary("GetInfo", self._get_info, pb.InfoRequest),
            NOTIFY: unary("NotifyRegistrationStatus", self._notify, pb.RegistrationStatus),
        }

    def _get_info(self, _request: pb.InfoRequest, context: Any) -> pb.PluginInfo:
        context.set_trailing_metadata(((SERVED_BY_KEY, SERVED_BY),))
        return self._info

    def _notify(self, request: pb.RegistrationStatus, _context: Any) -> pb.RegistrationStatusResponse:
        status = RegistrationStatus(request.plugin_registered, request.error)
        changed, self.status = status != self.status, status
        if status.registered:
            _log.info("plugin_registered", driver=self._info.name)
        if changed:
            self._owner.registration_changed(status)
        if not status.registered:
            raise RpcError(grpc.StatusCode.UNKNOWN, f"failed registration process: {status.error}")
        return pb.RegistrationStatusResponse()


@dataclass(frozen=True, slots=True)
class SocketOwner:
    """The program that listens on a socket. `endpoint` is its DRA socket; `reason` says why the owner is unknown."""

    origin: Origin
    endpoint: Path | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Seen:
    file: tuple[int, int, int]
    owner: SocketOwner
    silent_looks: int


class SocketWatch:
    """Checks the sockets in `registry_dir` and `plugin_dir` repeatedly.

    `look` may take a second for each socket that does not respond, and must run in one thread only. A socket of this
    plugin, or of a plugin with another name, is not called again until its file is replaced.
    """

    def __init__(self, driver: str, registry_dir: Path, plugin_dir: Path) -> None:
        self._driver = driver
        self._registry_dir = registry_dir
        self._plugin_dir = plugin_dir
        self._seen: dict[Path, _Seen] = {}

    def look(self) -> None:
        found: dict[Path, _Seen] = {}
        for directory in (self._registry_dir, self._plugin_dir):
            try:
                files = sorted(_sockets(directory))
            except OSError as error:
                _log.debug("sockets_not_listed", directory=str(directory), reason=str(error))
                found |= {path: seen for path, seen in self._seen.items() if path.parent == directory}
                continue
            # An endpoint of a registered plugin has the same owner as that plugin.
            endpoints = {seen.owner.endpoint for seen in found.values()}
            found |= {path: self._seen_now(path, file) for path, file in files if path not in endpoints}
        self._seen = found

    def problems(self) -> Sequence[NodeProblem]:
        return [
            NodeProblem("foreign-driver", self._stranger(path, seen.owner), str(path))
            for path, seen in self._seen.items()
            if seen.owner.origin == "foreign"
            or (
                seen.owner.origin == "silent"
                and seen.silent_looks >= _SILENT_LOOKS
                and self._may_be_ours(path)
            )
        ]

    def _seen_now(self, path: Path, file: tuple[int, int, int]) -> _Seen:
        before = self._seen.get(path)
        if before is not None and before.file != file:
            before = None
        if before is not None and before.owner.origin in ("ours", "elsewhere"):
            return before
        owner = owner_of(path, self._driver, self._plugin_dir)
        if owner.origin == "silent" and before is not None and before.owner.origin == "foreign":
            owner = before.owner  # the same process, which now hangs
        if before is None or before.owner != owner:
            _log.info(
                "socket_found",
                path=str(path),
                origin=owner.origin,
                endpoint=str(owner.endpoint or ""),
                reason=owner.reason,
            )
        looks = 0 if before is None else before.silent_looks
        return _Seen(file, owner, looks + 1 if owner.origin == "silent" else 0)

    def _may_be_ours(self, path: Path) -> bool:
        """Whether a driver with our name could use this file name; long names are hashed."""
        return path.parent == self._plugin_dir or self._driver in path.name or path.name.startswith("dra-")

    def _stranger(self, path: Path, owner: SocketOwner) -> str:
        if owner.origin == "foreign":
            return (
                f"Another DRA driver named {self._driver} runs on this node, on the socket {path}, so the kubelet may "
                "send it claims that are meant for gpu-dra-driver; find it with `kubectl get pods -A -o wide | grep -i "
                "dra`, and uninstall it"
            )
        return (
            f"The socket {path} does not answer, so gpu-dra-driver cannot find out which driver serves "
            f"{self._driver} there ({owner.reason}); `ss -xlp | grep {path.parent}` on the node shows its process; "
            "stop that process, or remove the socket if there is none"
        )


def owner_of(path: Path, driver: str, plugin_dir: Path) -> SocketOwner:
    """Return the current owner. In the plugin directory, a server without GetInfo belongs to another driver."""
    if not listening(path):
        return SocketOwner("dead")
    try:
        info, metadata = call_with_metadata(path, GET_INFO, pb.InfoRequest(), pb.PluginInfo, _QUERY_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and path.parent == plugin_dir:
            return SocketOwner("foreign")
        return SocketOwner("silent", reason=f"{error.code().name}: {error_text(error.details() or '')}")
    if info.name != driver or info.type != PLUGIN_TYPE:
        return SocketOwner("elsewhere")
    endpoint = Path(info.endpoint or path)
    is_ours = metadata.get(SERVED_BY_KEY) == SERVED_BY and endpoint.parent == plugin_dir
    return SocketOwner("ours" if is_ours else "foreign", endpoint)


def _sockets(directory: Path) -> Iterator[tuple[Path, tuple[int, int, int]]]:
    try:
        names = os.listdir(directory)  # noqa: PTH208  runs every few seconds: avoid Path objects
    except FileNotFoundError:
        return
    for name in names:
        path = directory / name
        file = None if name.startswith(".") else identity(path)
        if file is not None and stat.S_ISSOCK(path.lstat().st_mode):
            yield path, file
