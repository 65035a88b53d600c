"""The playground's kubelet: the part of the kubelet that a DRA driver meets, for demos and tests.

It watches the registry directory, registers the plugins it finds over their real sockets, and sends them
Prepare and Unprepare the way a kubelet does: to the most recently registered instance that is connected,
over one connection per endpoint, with a deadline. What a kubelet does to ResourceSlices is reported through
a callback. Every call is recorded, and faults can be injected.
"""

from __future__ import annotations

import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from dra_driver.kubelet.pb import registration_pb2
from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome
from playground.kubelet_client import (
    DRA_APIS,
    HEALTH_APIS,
    Call,
    Instance,
    KubeletError,
    Recorder,
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

HealthMode = Literal["off", "v1alpha1", "v1"]
_FileId = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """How the playground's kubelet behaves; times in seconds.

    `dra_apis` are the service names it knows. `health` is the generation of the kubelet's health client:
    "v1alpha1" opens a stream to every plugin and again after every end (1.36), "v1" only to the newest
    instance and only if advertised (1.37). `wipe_after_s` without a connection makes it drop a driver's
    slices. A plugin that cannot be registered is tried again after `retry_s`, then at longer intervals.
    """

    dra_apis: tuple[str, ...] = tuple(DRA_APIS)
    health: HealthMode = "off"
    health_retry_s: float = 5.0
    wipe_after_s: float = 30.0
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
    """Runs from start() to stop().

    `on_wipe` is called with a driver name when that driver has been away too long, and with None when the
    kubelet starts: a real one then deletes the ResourceSlices of the driver, or all of the node.
    """

    def __init__(
        self,
        registry_dir: Path,
        settings: KubeletSettings | None = None,
        *,
        on_wipe: Callable[[str | None], None] | None = None,
    ) -> None:
        self.registry_dir = registry_dir
        self.settings = settings or KubeletSettings()
        self._on_wipe = on_wipe
        self._recorder = Recorder()
        self._changed = threading.Condition()
        self._instances: dict[Path, tuple[_FileId, Instance]] = {}  # in the order of registration
        self._pending: dict[Path, _Pending] = {}
        self._lost_since: dict[str, float | None] = {}
        self._health: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Walks the directory and goes on watching it."""
        self._stopping.clear()
        self._wipe(None)
        self._thread = threading.Thread(target=self._run, name="playground-kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Drops all plugins without telling them, like a kubelet that ends."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        with self._changed:
            dropped = [instance for _, instance in self._instances.values()]
            self._instances.clear()
            self._pending.clear()
            self._lost_since.clear()
            self._health.clear()
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

    def health(self, driver: str) -> dict[tuple[str, str], tuple[str, str]]:
        """What the driver reported: (pool, device) to (status name, message)."""
        with self._changed:
            return dict(self._health.get(driver, {}))

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

    def calls(self, method: str | None = None) -> list[Call]:
        """The recorded calls in the order in which they ended."""
        return self._recorder.calls(method)

    def inject(self, method: str, error: str, *, times: int = 1, after: bool = False) -> None:
        """Lets the next calls of a method fail: before they are sent, or `after` the driver answered.

        Besides the gRPC methods there is "Validate": the kubelet refuses the plugin with this text.
        """
        self._recorder.inject(method, error, times, after)

    def _call(self, driver: str, method: str, claims: Sequence[ClaimRef], timeout_s: float) -> Any:
        instance = self._pick(driver)
        request = instance.request(method, claims)
        response = self._recorder.run(
            method, driver, instance.endpoint, request, lambda: instance.call(method, request, timeout_s)
        )
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
        self._count_absence()

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
            info = self._recorder.run(
                "GetInfo",
                "",
                path,
                request := registration_pb2.InfoRequest(),
                lambda: registration_call(
                    channel, "GetInfo", request, registration_pb2.PluginInfo, _GET_INFO_TIMEOUT_S
                ),
            )
            fault = self._fault(info, path)
            if fault is None:
                self._add(path, file, info)
            self._notify(channel, path, info.name, fault)
        finally:
            channel.close()
        if fault is not None:
            raise KubeletError(fault)

    def _notify(self, channel: Any, path: Path, driver: str, fault: str | None) -> None:
        status = registration_pb2.RegistrationStatus(plugin_registered=fault is None, error=fault or "")
        try:
            self._recorder.run(
                "NotifyRegistrationStatus",
                driver,
                path,
                status,
                lambda: registration_call(
                    channel,
                    "NotifyRegistrationStatus",
                    status,
                    registration_pb2.RegistrationStatusResponse,
                    _NOTIFY_TIMEOUT_S,
                ),
            )
        except KubeletError as error:
            _log.debug("plugin_not_notified", socket=str(path), error=str(error))

    def _fault(self, info: registration_pb2.PluginInfo, path: Path) -> str | None:
        """Why this plugin cannot be registered; None when it can."""
        injected = self._recorder.take("Validate")
        if injected is not None:
            return injected[0]
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
        instance = Instance(info.name, path, endpoint, version, tuple(info.supported_versions))
        with self._changed:
            self._instances[path] = (file, instance)
            self._changed.notify_all()
        if self.settings.health != "off":
            threading.Thread(
                target=self._watch_health, args=(instance,), name="playground-kubelet-health", daemon=True
            ).start()

    def _deregister(self, path: Path, instance: Instance) -> None:
        with self._changed:
            del self._instances[path]
            self._lost_since.setdefault(instance.driver, None)  # it may never have been seen connected
            self._changed.notify_all()
        instance.close()

    # ---- absence and health ---------------------------------------------------------------------------

    def _count_absence(self) -> None:
        now = time.monotonic()
        present = {entry.driver for _, entry in self._instances.values() if entry.connected}
        self._lost_since |= dict.fromkeys(present)
        for driver, since in list(self._lost_since.items()):
            if driver in present:
                continue
            if since is None:
                self._lost_since[driver] = now
            elif now - since >= self.settings.wipe_after_s:
                del self._lost_since[driver]
                self._wipe(driver)

    def _wipe(self, driver: str | None) -> None:
        if self._on_wipe is not None:
            self._on_wipe(driver)

    def _watch_health(self, instance: Instance) -> None:
        version = "v1alpha1.DRAResourceHealth"
        if self.settings.health == "v1":
            offered = [name for name in HEALTH_APIS if name in instance.supported]
            if not offered:
                return
            version = offered[0]
        while not instance.closed:
            if self.settings.health == "v1alpha1" or self.instances(instance.driver)[-1:] == [instance]:
                unimplemented = self._stream_health(instance, version)
                if self.settings.health == "v1" and unimplemented:
                    return
            instance.wait_closed(self.settings.health_retry_s)

    def _stream_health(self, instance: Instance, version: str) -> bool:
        """One stream until it ends; whether the driver does not have it."""

        def send() -> None:
            instance.watch_health(version, lambda message: self._note_health(instance, message))

        try:
            self._recorder.run("NodeWatchResources", instance.driver, instance.endpoint, version, send)
        except KubeletError as error:
            return error.code is not None and error.code.name == "UNIMPLEMENTED"
        return False

    def _note_health(self, instance: Instance, message: Any) -> None:
        with self._changed:
            known = self._health.setdefault(instance.driver, {})
            for device in message.devices:
                status = type(device).DESCRIPTOR.fields_by_name["health"].enum_type.values_by_number
                key = (device.device.pool_name, device.device.device_name)
                known[key] = (status[device.health].name, device.message)
            self._changed.notify_all()


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
