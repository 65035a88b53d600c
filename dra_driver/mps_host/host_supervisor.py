"""The MPS host: starts and stops the control daemons that the plugin requests, and reports their status."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import structlog

from dra_driver.base.atomic import (
    TEMPORARY_SUFFIX,
    clear_abandoned,
    make_directory,
    remove_file,
    set_aside,
    write_atomically,
)
from dra_driver.base.file_lock import LockBusyError, hold_file
from dra_driver.base.json_store import UnreadableFile
from dra_driver.errors import FatalError, RetryableError, StateError
from dra_driver.model.ids import is_dns_label
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon import Daemon, HostTools
from dra_driver.mps_host.daemon_compute_mode import DEFAULT
from dra_driver.mps_host.host_files import (
    LOCK_FILE,
    STATUS_FILE,
    SUFFIX,
    DaemonRecord,
    status_files,
    wanted_files,
)

_log = structlog.get_logger(__name__)

_LOCK_S = 1.0
"""The previous host may still be exiting."""


class Supervisor:
    """Daemons of different devices start and stop in parallel."""

    def __init__(self, tools: HostTools) -> None:
        self._tools = tools
        self._layout = tools.layout
        self._wanted = wanted_files(tools.layout, _log_unreadable)
        self._daemons: dict[str, Daemon] = {}
        self._published: dict[str, MpsDaemonStatus] = {}
        self._list_failure: str | None = None
        self._is_written = True
        self._publishing = threading.Lock()
        self._workers: dict[str, threading.Thread] = {}
        self._watch: threading.Thread | None = None
        self._held = ExitStack()

    def open(self) -> None:
        """Adopt existing daemons and start monitoring.

        Raises: FatalError if another host serves the directory, StateError if the directory cannot be used.
        """
        layout = self._layout
        busy = f"another MPS host already serves {layout.root}"
        try:
            layout.root.mkdir(parents=True, exist_ok=True)
            layout.root.chmod(0o711)  # servers may run as other users, which must reach their directories
            for path in (layout.lock, layout.modes, layout.alive):
                _free(path, Path.is_file)
            for path in (layout.statuses, layout.libraries):
                _free(path, Path.is_dir)
            descriptor = self._held.enter_context(hold_file(layout.lock, time.monotonic() + _LOCK_S, busy))
            os.ftruncate(descriptor, 0)  # empty until all daemons are adopted
            self._take_over()
            os.pwrite(descriptor, LOCK_FILE.write(None), 0)
        except LockBusyError as error:
            raise FatalError(str(error)) from error
        except OSError as error:
            raise StateError(f"cannot use {layout.root} for MPS: {error.strerror or error}") from error
        self._held.callback(os.ftruncate, descriptor, 0)
        self._watch = threading.Thread(target=self._keep_watch, name="mps-watch")
        self._watch.start()

    def close(self) -> None:
        """Daemons keep running, and the next host process continues unfinished starts."""
        self._tools.closing.set()
        if self._watch is not None:
            self._watch.join()
        for worker in list(self._workers.values()):
            worker.join()
        self._held.close()

    def status(self) -> tuple[MpsDaemonStatus, ...]:
        return tuple(daemon.status for daemon in [*self._daemons.values()] if not daemon.gone)

    def _take_over(self) -> None:
        layout = self._layout
        make_directory(layout.statuses, 0o700)
        for place in ("", "*/"):
            clear_abandoned(layout.root, f"{place}.*{TEMPORARY_SUFFIX}")
        for path in layout.statuses.glob(f"*{SUFFIX}"):
            _free(path, Path.is_file)
        records = self._tools.records
        records.load()
        for device, record in records.all().items():
            self._daemons[device] = Daemon(record, self._tools, recovered=True)
        for spec in self._specs(path.name.partition(".")[0] for path in records.quarantined()):
            if spec.device not in self._daemons and self._has_remains(spec.device):
                self._daemons[spec.device] = self._without_record(spec)
        if not self._daemons:
            _free(layout.wanted_directory, Path.is_dir)
            make_directory(layout.wanted_directory, 0o700)
        for path in layout.statuses.glob(f"*{SUFFIX}"):
            if path.name.removesuffix(SUFFIX) not in self._daemons:
                remove_file(path)
        for device in self._daemons:
            self._publish(device)

    def _specs(self, devices: Iterable[str]) -> Iterable[MpsDaemonSpec]:
        """Include all daemons that wanted and status files name."""
        found = {device: MpsDaemonSpec(device, "", "mig", "") for device in filter(is_dns_label, devices)}
        with suppress(StateError):
            found |= self._wanted.all()
        return (
            found | {status.device: status.spec for status in status_files(self._layout).all().values()}
        ).values()

    def _has_remains(self, device: str) -> bool:
        """Ignore the compute mode, which an administrator may have set."""
        directory, pipe = self._layout.directory(device), self._layout.directories(device).pipe
        return directory.exists() or bool(processes.users_of(pipe))

    def _without_record(self, spec: MpsDaemonSpec) -> Daemon:
        """Return a daemon whose GPUs get the default compute mode when it stops."""
        gpus = spec.gpu_uuids if spec.kind == "gpu" else ()
        modes_of = ", ".join(gpus) or None
        _log.warning("mps_daemon_without_record", device=spec.device, compute_mode_of=modes_of)
        record = DaemonRecord(spec, dict.fromkeys(gpus, DEFAULT))
        return Daemon(record, self._tools, recovered=True)

    # --- what shall run ------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        timings = self._tools.timings
        probe_at, tick_at, sign_at = time.monotonic() + timings.probe, 0.0, 0.0
        while not self._tools.closing.is_set():
            now = time.monotonic()
            self._look()
            if now >= tick_at:
                tick_at = now + timings.tick
                self._tick(now)
            if now >= sign_at and self._is_written:
                sign_at = now + timings.sign
                self._touch_alive()
            if now >= probe_at:
                probe_at = now + timings.probe
                self._work("probe", partial(_probe_all, [*self._daemons.values()]))
            self._tools.closing.wait(timings.look if self._daemons or self._published else timings.idle)

    def _look(self) -> None:
        for device, daemon in [*self._daemons.items()]:
            if daemon.gone:
                del self._daemons[device]
        try:
            wanted = self._wanted.all()
        except StateError as error:
            if self._list_failure != str(error):
                self._list_failure = str(error)
                _log.warning(
                    "mps_wanted_unreadable", path=str(self._layout.wanted_directory), reason=str(error)
                )
            return
        self._list_failure = None
        for device, spec in wanted.items():
            if device not in self._daemons and not self._is_busy(device):
                daemon = self._daemons[device] = Daemon(
                    DaemonRecord(spec), self._tools, refuse=partial(self._refuse_overlap, spec)
                )
                self._attend(device, daemon.keep)
        unread = {path.name.removesuffix(SUFFIX) for path in self._wanted.quarantined()}
        for device, daemon in self._daemons.items():
            if device not in unread and wanted.get(device) != daemon.status.spec and not daemon.ending:
                self._attend(device, partial(daemon.stop, partial(self._is_over, daemon)))

    def _is_over(self, daemon: Daemon) -> bool:
        """Publish that the daemon no longer serves, then return whether it is still unwanted. Raises: StateError."""
        device = daemon.status.device
        if not self._publish(device):
            with self._publishing:
                remove_file(self._layout.status(device))
                self._published.pop(device, None)
        is_other = self._wanted.get(device) not in (None, daemon.status.spec)
        return is_other or self._layout.is_unwanted(device)

    def _tick(self, now: float) -> None:
        for device, daemon in self._daemons.items():
            if daemon.needs_attention(now):
                self._attend(device, daemon.keep)
        self._is_written = all([self._publish(device) for device in {*self._daemons, *self._published}])

    def _touch_alive(self) -> None:
        with suppress(OSError):
            self._layout.alive.touch(mode=0o600)

    def _refuse_overlap(self, spec: MpsDaemonSpec) -> None:
        """Raise RetryableError while an older daemon uses one of the GPUs: the first to stop would restore the compute
        mode that the other still needs.
        """
        for other in self.status():
            if other.device == spec.device:
                return
            common = set(spec.gpu_uuids) & set(other.spec.gpu_uuids)
            if common and spec.kind == other.spec.kind == "gpu":
                theirs = ", ".join(other.spec.devices)
                raise RetryableError(
                    f"GPU {min(common)} has the MPS daemon of {theirs}, which must stop before "
                    f"{', '.join(spec.devices)} can get one; it stops when the claims that use it are gone"
                )

    # --- what runs -----------------------------------------------------------------------------

    def _publish(self, device: str) -> bool:
        """Return False after a failure, which the next check retries."""
        with self._publishing:
            daemon = self._daemons.get(device)
            status = None if daemon is None or daemon.gone else daemon.status
            try:
                if status is None:
                    remove_file(self._layout.status(device))
                    self._published.pop(device, None)
                elif status != self._published.get(device):
                    content = STATUS_FILE.write(status)
                    write_atomically(self._layout.status(device), content, durable=False, whole=False)
                    self._published[device] = status
            except StateError as error:
                _log.warning("mps_status_not_written", device=device, reason=str(error))
                return False
            return True

    # --- threads -------------------------------------------------------------------------------

    def _attend(self, device: str, act: Callable[[], None]) -> None:
        def attend() -> None:
            act()
            self._publish(device)

        self._work(device, attend)

    def _is_busy(self, name: str) -> bool:
        return name in self._workers and self._workers[name].is_alive()

    def _work(self, name: str, action: Callable[[], object]) -> None:
        """Run the action in a new thread, unless the last one with this name still runs."""
        if self._is_busy(name):
            return
        thread = threading.Thread(target=_logged, args=(action,), name=f"mps-{name}")
        try:
            thread.start()
            self._workers[name] = thread
        except RuntimeError as error:  # the next check retries
            _log.warning("mps_check_delayed", thread=thread.name, reason=str(error))


def _free(path: Path, is_right: Callable[[Path], bool]) -> None:
    """Set aside a file of the wrong type that would block all devices. Raises: StateError."""
    if os.path.lexists(path) and (path.is_symlink() or not is_right(path)):
        kept = set_aside(path, "file of the MPS host")
        _log.warning("mps_file_set_aside", path=str(path), kept_as=str(kept))


def _log_unreadable(found: UnreadableFile) -> None:
    _log.warning("mps_wanted_unreadable", path=str(found.kept_as), reason=found.reason)


def _logged(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001  the next check starts it again
        _log.exception("mps_watch_failed")


def _probe_all(daemons: list[Daemon]) -> None:
    pipes = [daemon.directories.pipe for daemon in daemons if not daemon.status.spec.multi_user]
    users: dict[str, set[int]] = {}
    with suppress(StateError):  # they are only shown
        users = processes.users_by_directory(pipes)
    for daemon in daemons:
        daemon.probe(users.get(daemon.directories.pipe, ()))
