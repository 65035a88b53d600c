"""The playground's kubelet: the part of the kubelet that a DRA driver uses, for demos and tests.

It finds plugins in the registry directory, and registers them over their real sockets. Like a kubelet, it sends Prepare
and Unprepare to the most recently registered instance that is connected, over one connection per endpoint, with a
deadline.
"""

from __future__ import annotations

import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from dra_driver.kubelet.pb import registration_pb2
from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome
from playground import PATIENCE_S
from playground.kubelet_client import (
    DRA_APIS,
    Instance,
    KubeletError,
    check_entries,
    open_channel,
    prepare_outcomes,
    registration_call,
    unprepare_outcomes,
)

_log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 45.0
_GET_INFO_TIMEOUT_S = 1.0
_NOTIFY_TIMEOUT_S = 5.0
_JOIN_S = 10.0
_DRIVER = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")

_FileId = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """How the playground's kubelet behaves; times in seconds.

    `dra_apis` are the service names that it supports. If it cannot register a plugin, it retries every `retry_s`.
    """

    dra_apis: tuple[str, ...] = tuple(DRA_APIS)
    retry_s: float = 0.1
    poll_s: float = 0.02


class PlaygroundKubelet:
    """A kubelet that runs from start() to stop().

    It calls `on_start` when it starts; a real kubelet then deletes the ResourceSlices of its node. Each text in
    `refusals` refuses one registration with that text.
    """

    def __init__(
        self,
        registry_dir: Path,
        settings: KubeletSettings | None = None,
        *,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.registry_dir = registry_dir
        self.settings = settings or KubeletSettings()
        self.refusals: list[str] = []
        self._on_start = on_start
        self._changed = threading.Condition()
        self._instances: dict[Path, tuple[_FileId, Instance]] = {}  # in the order of registration
        self._retry_at: dict[tuple[Path, _FileId], float] = {}  # of sockets that could not be registered
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to watch the directory."""
        self._stopping.clear()
        self._on_start()
        self._thread = threading.Thread(target=self._run, name="playground-kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the connections to all plugins without notice, like a kubelet that exits."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        with self._changed:
            dropped = [instance for _, instance in self._instances.values()]
            self._instances.clear()
            self._retry_at.clear()
            self._changed.notify_all()
        for instance in dropped:
            instance.close()

    def restart(self) -> None:
        """Stop and start. The kubelet forgets all plugins and reads the directory again."""
        self.stop()
        self.start()

    # ---- what the kubelet knows -----------------------------------------------------------------------

    def instances(self, driver: str) -> list[Instance]:
        """Return the registered instances of a driver, oldest first."""
        with self._changed:
            return [entry for _, entry in self._instances.values() if entry.driver == driver]

    def wait_registered(
        self, driver: str, *, count: int = 1, timeout_s: float = PATIENCE_S
    ) -> list[Instance]:
        """Wait until exactly `count` instances are registered and, unless it is 0, one is connected.

        Raises: TimeoutError.
        """

        def ready() -> bool:
            found = self.instances(driver)
            return len(found) == count and (count == 0 or any(entry.connected for entry in found))

        until = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{driver}: {len(self.instances(driver))} instances after {timeout_s:g} s, expected {count}"
                )
            with self._changed:
                self._changed.wait(self.settings.poll_s)
        return self.instances(driver)

    # ---- calls ----------------------------------------------------------------------------------------

    def prepare(
        self, driver: str, claims: Sequence[ClaimRef], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, PrepareOutcome]:
        """Call NodePrepareResources. Raises: KubeletError if the call fails or returns the wrong claims."""
        return prepare_outcomes(self._call(driver, "NodePrepareResources", claims, timeout_s))

    def unprepare(
        self, driver: str, claims: Sequence[ClaimRef], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, UnprepareOutcome]:
        """Call NodeUnprepareResources. Raises: KubeletError if the call fails or returns the wrong claims."""
        return unprepare_outcomes(self._call(driver, "NodeUnprepareResources", claims, timeout_s))

    def _call(self, driver: str, method: str, claims: Sequence[ClaimRef], timeout_s: float) -> Any:
        instance = self._pick(driver)
        request = instance.request(method, claims)
        response = instance.call(method, request, timeout_s)
        check_entries(method, claims, response)
        return response

    def _pick(self, driver: str) -> Instance:
        known = self.instances(driver)
        if not known:
            raise KubeletError(f"DRA driver {driver} is not registered")
        return next((entry for entry in reversed(known) if entry.connected), known[-1])

    # ---- plugin watcher -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
            except Exception:
                _log.exception("playground_kubelet_failed")
            self._stopping.wait(self.settings.poll_s)

    def _look(self) -> None:
        found = dict(_sockets(self.registry_dir))
        for path, (file, instance) in list(self._instances.items()):
            if found.get(path) != file:
                self._deregister(path, instance)
            else:
                instance.look()
        self._retry_at = {one: at for one, at in self._retry_at.items() if found.get(one[0]) == one[1]}
        for path, file in found.items():
            if path not in self._instances and not self._stopping.is_set():
                self._try(path, file)

    def _try(self, path: Path, file: _FileId) -> None:
        if time.monotonic() < self._retry_at.get((path, file), 0.0):
            return
        try:
            self._register(path, file)
        except KubeletError as error:
            _log.debug("plugin_not_registered", socket=str(path), error=str(error))
            self._retry_at[path, file] = time.monotonic() + self.settings.retry_s

    def _register(self, path: Path, file: _FileId) -> None:
        channel = open_channel(path)
        try:
            request = registration_pb2.InfoRequest()
            info = registration_call(
                channel, "GetInfo", request, registration_pb2.PluginInfo, _GET_INFO_TIMEOUT_S
            )
            fault = self._fault(info, path)
            if fault is None:
                self._add(path, file, info)
            self._notify(channel, path, fault)
        finally:
            channel.close()
        if fault is not None:
            raise KubeletError(fault)

    def _notify(self, channel: Any, path: Path, fault: str | None) -> None:
        status = registration_pb2.RegistrationStatus(plugin_registered=fault is None, error=fault or "")
        answer = registration_pb2.RegistrationStatusResponse
        try:
            registration_call(channel, "NotifyRegistrationStatus", status, answer, _NOTIFY_TIMEOUT_S)
        except KubeletError as error:
            _log.debug("plugin_not_notified", socket=str(path), error=str(error))

    def _fault(self, info: registration_pb2.PluginInfo, path: Path) -> str | None:
        """Return why this plugin cannot be registered; None if it can."""
        if self.refusals:
            return self.refusals.pop(0)
        if info.type != "DRAPlugin":
            return f"no handler registered for plugin type {info.type!r} at socket {path}"
        if not _DRIVER.fullmatch(info.name):
            return f"plugin name {info.name!r} is not a DNS subdomain"
        if info.endpoint and not Path(info.endpoint).is_absolute():
            return f"endpoint {info.endpoint!r} is not an absolute path"
        if self._version(info) is None:
            return f"none of the plugin's versions {list(info.supported_versions)} is known"
        endpoint = Path(info.endpoint or path)
        if any(entry.endpoint == endpoint for entry in self.instances(info.name)):
            return f"endpoint {endpoint} already registered for DRA driver plugin {info.name}"
        return None

    def _version(self, info: registration_pb2.PluginInfo) -> str | None:
        """Return the first DRA service in the plugin's list that this kubelet supports; None if it supports none."""
        return next((name for name in info.supported_versions if name in self.settings.dra_apis), None)

    def _add(self, path: Path, file: _FileId, info: registration_pb2.PluginInfo) -> None:
        version = self._version(info) or ""
        endpoint = Path(info.endpoint or path)
        instance = Instance(info.name, path, endpoint, version)
        with self._changed:
            self._instances[path] = (file, instance)
            self._changed.notify_all()

    def _deregister(self, path: Path, instance: Instance) -> None:
        with self._changed:
            del self._instances[path]
            self._changed.notify_all()
        instance.close()


def _sockets(directory: Path) -> list[tuple[Path, _FileId]]:
    """Return the sockets below the directory in the order of their names, without names that start with a dot."""
    found: list[tuple[Path, _FileId]] = []
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return found
    for path in entries:
        if path.name.startswith("."):
            continue
        try:
            info = path.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(info.st_mode):
            found += _sockets(path)
        elif stat.S_ISSOCK(info.st_mode):
            found.append((path, (info.st_dev, info.st_ino, info.st_mtime_ns)))
    return found
