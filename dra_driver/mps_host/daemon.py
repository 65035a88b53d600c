"""One control daemon: starts it, keeps it running, stops it. Every step can be repeated after a crash.

| Step of a start | A crash after it leaves | The next host | A stop |
|---|---|---|---|
| record, with the compute modes of all GPUs | a record | keeps the modes | removes it |
| GPUs exclusive, in parallel | some GPUs exclusive | makes the other GPUs exclusive | restores exclusive GPUs |
| directories, tmpfs | the directories too | continues | removes them too |
| daemon started | everything | finds it by its pipe directory, and sets the limits | stops it |

| Step of a stop | A crash after it leaves (the next host continues) |
|---|---|
| processes stopped | directories, modes |
| compute modes restored, in parallel | some GPUs exclusive |
| directories removed | the record |
| record removed | the status |
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.base.threads import run_in_parallel
from dra_driver.errors import (
    DraDriverError,
    NotSupportedError,
    NvmlDetachedError,
    PermanentError,
    RetryableError,
)
from dra_driver.model.dataclass import dataclass, field, replace
from dra_driver.model.driver_files import FindPrograms
from dra_driver.model.mps import MpsDaemonStatus, MpsState
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon_compute_mode import DEFAULT, EXCLUSIVE_PROCESS, ComputeMode
from dra_driver.mps_host.daemon_control import (
    OUTPUT,
    DaemonControl,
    StartCancelledError,
    Timings,
    bound_logs,
    check_spec,
    log_tail,
    status_text,
)
from dra_driver.mps_host.daemon_mounts import KernelMounter, SelinuxLabels
from dra_driver.mps_host.daemon_processes import ProcessId
from dra_driver.mps_host.host_files import DaemonRecord, DaemonRecords, MpsLayout

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_UNANSWERED = 3
"""A daemon that misses one or two queries may only be busy."""
_GPUS_AT_ONCE = 16
_STOP_AGAIN_S = 2.0


@dataclass(frozen=True)
class HostTools:
    """`make_capability_nodes` creates MIG device nodes, or raises RetryableError."""

    layout: MpsLayout
    programs: FindPrograms
    mounter: KernelMounter
    compute_mode: ComputeMode
    make_capability_nodes: Callable[[], None]
    labels: SelinuxLabels
    timings: Timings
    closing: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def records(self) -> DaemonRecords:
        return DaemonRecords(self.layout)


class Daemon:
    """Only one call runs at a time; reading `status` never waits."""

    def __init__(
        self,
        record: DaemonRecord,
        tools: HostTools,
        *,
        recovered: bool = False,
        refuse: Callable[[], None] = lambda: None,
    ) -> None:
        """If `recovered`, the daemon existed before this process, and a failure removes nothing.

        `refuse` raises RetryableError while the daemon must not start.
        """
        self._tools = tools
        self._refuse = refuse
        self._record = record
        self._process: ProcessId | None = None
        self._established = recovered
        self._lock = threading.Lock()
        self.directories = tools.layout.directories(record.spec.device)
        self._control = DaemonControl(
            tools.programs, record.spec, self.directories, tools.timings, tools.closing
        )
        self._backoff = Backoff(tools.timings.first_backoff, tools.timings.longest_backoff)
        self._retry_at = 0.0
        self.ending = False
        """A stop cannot be cancelled."""
        self.gone = False
        self._unanswered = 0
        self._check_gpus_at = 0.0
        self._without_mode: set[str] = set(record.spec.gpu_uuids) if record.spec.kind == "mig" else set()
        self.status = MpsDaemonStatus(
            record.spec.device,
            "starting",
            record.spec,
            since=int(time.time()),
            directory=str(tools.layout.directory(record.spec.device)),
        )

    # --- what callers want ---------------------------------------------------------------------

    def keep(self) -> None:
        """Start the daemon if necessary, or continue a stop. Never raises; `status` shows failures.

        Undoes only a failed first start: after it, clients may use the daemon.
        """
        with self._lock:
            if self.gone or self._tools.closing.is_set():
                return
            try:
                if self.ending:
                    self._end()
                elif not self._is_up():
                    self._bring_up()
            except StartCancelledError:
                pass  # the next host process continues the start, or `stop` undoes it
            except Exception as error:  # noqa: BLE001  retried later, and shown in the status
                if not isinstance(error, DraDriverError):
                    _log.exception("mps_request_failed")
                self._failed(error)

    def stop(self, is_over: Callable[[], bool]) -> None:
        """Stop the daemon and remove everything that it created, unless `is_over` returns False.

        `is_over` is called after the status says that the daemon no longer serves. Never raises; a failed stop is
        retried.
        """
        with self._lock:
            before = self.status
            self._show("stopped")
            try:
                if not is_over():
                    self.status = before
                    return
                self.ending = True
                self._end()
            except DraDriverError as error:
                self._failed(error)

    def needs_attention(self, now: float) -> bool:
        """Whether `keep` has work to do. Also notices a daemon that has exited."""
        if self.gone or now < self._retry_at or self._lock.locked():
            return False
        if self.status.state not in ("ready", "fault"):
            return True
        if not self._is_up():
            self._died(now)
        return False

    def probe(self, users: Collection[int] = ()) -> None:
        """Query faults and clients, keep the GPUs exclusive, and truncate logs. Never raises.

        `users` are the user IDs of the clients.
        """
        before = self.status
        if before.state not in ("ready", "fault") or before.pid is None:
            return
        bound_logs(self.directories)
        try:
            problem, clients = self._control.query_servers()
            self._unanswered = 0
        except RetryableError as error:
            self._unanswered += 1
            problem, clients = (str(error) if self._unanswered >= _UNANSWERED else before.problem), None
        with self._lock:
            if self.status.pid == before.pid and self.status.state in ("ready", "fault"):
                self._probed(problem, clients, users)
                if time.monotonic() >= self._check_gpus_at:
                    self._keep_gpus_exclusive()

    # --- up ------------------------------------------------------------------------------------

    def _bring_up(self) -> None:
        try:
            self._start_or_adopt(time.monotonic() + self._tools.timings.start)
        except DraDriverError:
            if not self._established:
                with suppress(DraDriverError):
                    self._take_down()
            raise

    def _start_or_adopt(self, deadline: float) -> None:
        self._tools.records.refuse_newer(self._record.spec.device)
        check_spec(self._record.spec)
        self._tools.layout.refuse_long_path(self._record.spec.device)
        self._refuse()
        started = time.monotonic()
        self._show("starting", problem=self.status.problem)
        process = self._process = self._find_running()
        adopted = process is not None
        if adopted:
            self._keep_gpus_exclusive()
        if process is None:
            self._make_gpus_exclusive_in_time(deadline)
            if self._record.spec.kind == "mig":
                self._tools.make_capability_nodes()
            self._make_directories()
            self._clear_pipes()
            process = self._process = self._start()
        try:
            self._control.wait_ready(
                process, partial(self._tools.layout.is_unwanted, self._record.spec.device)
            )
            self._control.apply_limits()
        except DraDriverError as error:
            # An adopted daemon that does not answer may serve clients: it hangs, or talks with another program.
            if isinstance(error, PermanentError) or not (adopted and self._has_servers()):
                self._control.stop_processes(self._process)
            raise
        self._established = True
        self._show("ready", pid=process.pid)
        _log.info(
            "mps_daemon_adopted" if adopted else "mps_daemon_started",
            device=self._record.spec.device,
            pid=process.pid,
            duration_s=round(time.monotonic() - started, 3),
        )

    def _find_running(self) -> ProcessId | None:
        if self._process is not None and processes.is_alive(self._process):
            return self._process
        users = processes.users_of(self.directories.pipe)
        return next(
            (user for user in users if processes.is_control_daemon(user, self.directories.pipe)), None
        )

    def _has_servers(self) -> bool:
        return len(processes.users_of(self.directories.pipe)) > 1

    def _make_directories(self) -> None:
        tools, paths = self._tools, self.directories
        modes = {Path(paths.pipe).parent: 0o711, Path(paths.pipe): 0o755, Path(paths.log): 0o755}
        shm = Path(paths.shm)
        try:
            for path, mode in modes.items():
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(mode)
            shm.mkdir(exist_ok=True)
        except OSError as error:
            raise RetryableError(
                f"cannot create the directories of the MPS daemon: {error.filename}: {error.strerror}"
            ) from error
        tools.mounter.mount(shm)
        with suppress(OSError):
            shm.chmod(0o1777)
        for shared in (Path(paths.pipe), Path(paths.log), shm):
            tools.labels.label(shared)

    def _make_gpus_exclusive(self, *, again: bool = False) -> None:
        """Record the earlier modes, then make each GPU exclusive to MPS.

        `again` is for a running daemon: corrects the default mode, which a GPU reset or driver reload sets, and keeps
        any other mode, which someone set on purpose.
        """
        tools, spec = self._tools, self._record.spec
        self._check_gpus_at = time.monotonic() + tools.timings.exclusive
        asked = [uuid for uuid in spec.gpu_uuids if uuid not in self._without_mode]
        found, unread = _on_each(partial(self._where_supported, tools.compute_mode.get), asked)
        if unread is not None and not again:
            raise unread
        gone = {uuid for uuid, mode in found.items() if mode is None} - self._without_mode
        if 0 < len(gone) < len(spec.gpu_uuids) and not again:
            # CUDA ignores every device after one that it does not find.
            raise RetryableError(
                f"cannot start the MPS daemon of {spec.device}: nvidia-smi does not find {', '.join(sorted(gone))}; "
                "check the kernel log for Xid errors"
            )
        wrong = {
            uuid: mode
            for uuid, mode in found.items()
            if mode is not None and mode != EXCLUSIVE_PROCESS and not (again and mode != DEFAULT)
        }
        self._write(replace(self._record, modes_before={**wrong, **self._record.modes_before}))
        if not again and tools.layout.is_unwanted(spec.device):
            raise StartCancelledError("a stop of the daemon was requested")

        def make_exclusive(uuid: str) -> None:
            tools.compute_mode.set(uuid, EXCLUSIVE_PROCESS)

        done, unset = _on_each(partial(self._where_supported, make_exclusive), wrong)
        if again:
            for uuid in sorted(done.keys() - self._without_mode):
                _log.warning("compute_mode_restored", device=spec.device, before=wrong[uuid])
        problem = unread or unset
        if problem is not None:
            raise problem

    def _make_gpus_exclusive_in_time(self, deadline: float) -> None:
        began = time.monotonic()
        self._make_gpus_exclusive()
        now = time.monotonic()
        gpus = [uuid for uuid in self._record.spec.gpu_uuids if uuid not in self._without_mode]
        if gpus and now >= deadline:
            whose = f"modes of {len(gpus)} GPUs" if len(gpus) > 1 else f"mode of GPU {gpus[0]}"
            raise RetryableError(
                f"the MPS daemon of {self._record.spec.device} was not started in time: reading and setting the "
                f"compute {whose} took {now - began:.1f} s; enable persistence mode on the node "
                "(nvidia-persistenced, or `nvidia-smi -pm 1`) so that nvidia-smi does not have to initialise each GPU"
            )

    def _where_supported(self, ask: Callable[[str], T], gpu_uuid: str) -> T | None:
        """Return None if the GPU has no compute mode, so that programs can bypass MPS."""
        try:
            return ask(gpu_uuid)
        except NotSupportedError as error:
            self._without_mode.add(gpu_uuid)
            self.status = replace(self.status, not_exclusive=tuple(sorted(self._without_mode)))
            _log.warning("compute_mode_not_supported", device=self._record.spec.device, error=str(error))
            return None

    def _keep_gpus_exclusive(self) -> None:
        try:
            self._make_gpus_exclusive(again=True)
        except NvmlDetachedError:
            self._check_gpus_at = 0.0  # check as soon as NVML is open again, because the mode may be lost
        except DraDriverError as error:
            self._check_gpus_at = time.monotonic() + self._tools.timings.exclusive
            _log.warning("compute_mode_not_set", device=self._record.spec.device, error=str(error))

    def _clear_pipes(self) -> None:
        """Stop the servers of a dead daemon, and remove files with which it would seem alive."""
        processes.end(processes.users_of(self.directories.pipe), self._tools.timings.patience)
        _clear_directory(Path(self.directories.pipe))

    def _start(self) -> ProcessId:
        bound_logs(self.directories)
        with suppress(OSError):
            Path(self.directories.log, OUTPUT).unlink(missing_ok=True)
        return self._tools.mounter.within(Path(self.directories.shm), self._control.start)

    # --- down ----------------------------------------------------------------------------------

    def _end(self) -> None:
        self._take_down()
        self.gone = True
        self._show("stopped")
        _log.info("mps_daemon_stopped", device=self.status.device)

    def _take_down(self) -> None:
        spec = self._record.spec
        self._tools.records.refuse_newer(spec.device)
        self._control.stop_processes(self._process)
        self._restore_gpus()
        remove_directory(self._tools, spec.device)
        self._tools.records.forget(spec.device)
        self._record = DaemonRecord(spec)

    def _restore_gpus(self) -> None:
        """Restore the modes. Raises: the first error, after trying all GPUs."""
        mode, before = self._tools.compute_mode, self._record.modes_before

        def put_back(uuid: str) -> None:
            with suppress(NotSupportedError):
                if mode.get(uuid) == EXCLUSIVE_PROCESS:
                    mode.set(uuid, before[uuid])

        _, problem = _on_each(put_back, before)
        if problem is not None:
            raise problem

    # --- state ---------------------------------------------------------------------------------

    def _is_up(self) -> bool:
        process = self._process
        return self.status.state in ("ready", "fault") and process is not None and processes.is_alive(process)

    def _died(self, now: float) -> None:
        code = None if self._process is None else processes.reap(self._process.pid)
        if time.time() - self.status.since > self._tools.timings.calm:
            self._backoff.reset()
        problem = (
            f"the control daemon stopped with {status_text(code)}; {log_tail(self.directories) or 'no log'}"
        )
        self._show("failed", problem=problem)
        self._retry_at = now + self._backoff.step()
        _log.warning("mps_daemon_died", device=self.status.device, problem=problem)

    def _failed(self, error: Exception) -> None:
        self._show("failed", problem=" ".join(str(error).split()))
        pause = self._backoff.step()
        # The plugin withholds the GPU until the daemon is completely removed.
        self._retry_at = time.monotonic() + (min(pause, _STOP_AGAIN_S) if self.ending else pause)
        _log.warning("mps_daemon_failed", device=self.status.device, error=str(error))

    def _probed(self, problem: str | None, clients: int | None, users: Collection[int]) -> None:
        """Show FAULT, without a restart: clients may still be running, and MPS recovers by itself."""
        if problem and self.status.problem != problem:
            _log.warning("mps_fault", device=self.status.device, problem=problem)
        if problem != self.status.problem:
            self._show("fault" if problem else "ready", pid=self.status.pid, problem=problem)
        self.status = replace(self.status, clients=clients, users=tuple(sorted(users)))

    def _show(self, state: MpsState, *, pid: int | None = None, problem: str | None = None) -> None:
        since = self.status.since if self.status.state == state else int(time.time())
        self.status = replace(self.status, state=state, pid=pid, since=since, problem=problem, clients=None)

    def _write(self, record: DaemonRecord) -> None:
        if record != self._record or not self._tools.layout.record(record.spec.device).exists():
            self._tools.records.save(record)
            self._record = record


def _on_each(
    action: Callable[[str], T], gpu_uuids: Iterable[str]
) -> tuple[dict[str, T], BaseException | None]:
    """Return results by GPU, and the first error.

    Runs in parallel: without persistence mode nvidia-smi takes seconds.
    """
    uuids = list(gpu_uuids)
    futures = run_in_parallel([partial(action, uuid) for uuid in uuids], _GPUS_AT_ONCE)
    errors = [future.exception() for future in futures]
    done = {
        uuid: future.result()
        for uuid, future, error in zip(uuids, futures, errors, strict=True)
        if error is None
    }
    return done, next((error for error in errors if error is not None), None)


def remove_directory(tools: HostTools, device: str) -> None:
    """Remove a device's directory and its mounts. Raises: RetryableError."""
    top = tools.layout.directory(device)
    if not os.path.lexists(top):
        return
    tools.mounter.unmount(Path(tools.layout.directories(device).shm))
    try:
        if top.is_dir() and not top.is_symlink():
            shutil.rmtree(top)
        else:  # rmtree would block on a pipe
            top.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RetryableError(f"cannot remove {error.filename or top}: {error.strerror}") from error


def _clear_directory(path: Path) -> None:
    try:
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise RetryableError(f"cannot clear {error.filename or path}: {error.strerror}") from error
