"""The playground's kubelet: the part of the kubelet that a DRA driver meets, for demos and tests.

It watches the registry directory, registers the plugins it finds over their real sockets, and sends them
Prepare and Unprepare the way a kubelet does: to the most recently registered instance that is connected,
over one connection per endpoint, with a deadline.
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

    `dra_apis` are the service names it knows. A plugin that cannot be registered is tried again after
    `retry_s`, then at longer intervals.
    """

    dra_apis: tuple[str, ...] = tuple(DRA_APIS)
    retry_s: float = 0.1
    max_retry_s: float = 2.0
    poll_s: float = 0.02


@dataclass(slots=True)
class _Pending:
    """A socket that is not registered yet."""

    file: _FileId
    due: float
    delay: float


class PlaygroundKubelet:
    """Runs from start() to stop(). `on_start` is called when it starts: a real kubelet then deletes the
    ResourceSlices of its node. It refuses the next plugins that it finds with the texts in `refusals`."""

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
        self._pending: dict[Path, _Pending] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads the directory and starts to watch it."""
        self._stopping.clear()
        self._on_start()
        self._thread = threading.Thread(target=self._run, name="playground-kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Drops all plugins without notice, like a kubelet that exits."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        with self._changed:
            dropped = [instance for _, instance in self._instances.values()]
            self._instances.clear()
            self._pending.clear()
            self._changed.notify_all()
        for instance in dropped:
            instance.close()

    def restart(self) -> None:
        """Stops and starts: nothing is remembered, the directory is walked again."""
        self.stop()
        self.start()

    # ---- what the kubelet knows -----------------------------------------------------------------------

    def instances(self, driver: str) -> list[Instance]:
        """The registered instances of a driver, oldest first."""
        with self._changed:
            return [entry for _, entry in self._instances.values() if entry.driver == driver]

    def wait_registered(self, driver: str, *, count: int = 1, timeout_s: float = 10.0) -> list[Instance]:
        """Waits until exactly `count` instances are registered and, unless 0, one is connected.

        Raises: TimeoutError.
        """

        def ready() -> bool:
            found = self.instances(driver)
            return len(found) == count and (count == 0 or any(entry.connected for entry in found))

        until = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > until:
                raise TimeoutError(f"{driver}: {len(self.instances(driver))} instances, not {count}, in time")
            with self._changed:
                self._changed.wait(self.settings.poll_s)
        return self.instances(driver)

    # ---- calls ----------------------------------------------------------------------------------------

    def prepare(
        self, driver: str, claims: Sequence[ClaimRef], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, PrepareOutcome]:
        """NodePrepareResources. Raises: KubeletError for a failed call or a wrong set of entries."""
        return prepare_outcomes(self._call(driver, "NodePrepareResources", claims, timeout_s))

    def unprepare(
        self, driver: str, claims: Sequence[ClaimRef], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, UnprepareOutcome]:
        """NodeUnprepareResources. Raises: KubeletError for a failed call or a wrong set of entries."""
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
        self._pending = {path: entry for path, entry in self._pending.items() if path in found}
        for path, file in found.items():
            if path not in self._instances and not self._stopping.is_set():
                self._try(path, file)

    def _try(self, path: Path, file: _FileId) -> None:
        pending = self._pending.get(path)
        if pending is None or pending.file != file:
            pending = self._pending[path] = _Pending(file, 0.0, self.settings.retry_s)
        if time.monotonic() < pending.due:
            return
        try:
            self._register(path, file)
            del self._pending[path]
        except KubeletError as error:
            _log.debug("plugin_not_registered", socket=str(path), error=str(error))
            pending.due = time.monotonic() + pending.delay
            pending.delay = min(pending.delay * 2, self.settings.max_retry_s)

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
        """Why this plugin cannot be registered; None when it can."""
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
        """The first DRA service of the plugin's list that this kubelet knows."""
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
    """The sockets below the directory, walked in the order of names; nothing that starts with a dot."""
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
