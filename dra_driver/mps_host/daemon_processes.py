"""Processes identified by PID and start time, so that no signal reaches a later process with the same PID.

Functions raise StateError if this process can open no files now.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dra_driver.base.atomic import refuse_own_limit, state_error
from dra_driver.errors import StateError
from dra_driver.model.dataclass import dataclass

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"

_PROC = "/proc"
_START_TIME_FIELD = 19  # position after the command name, which ends with ")"
_THREADS_FIELD = 17
_GONE = "ZX"
_ENDING = "D"
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process of the current boot; `start_time` is in clock ticks since the boot."""

    pid: int
    start_time: int


def identify(pid: int) -> ProcessId | None:
    """Return the process with this PID; None if there is none or it is a zombie."""
    state, start_time = _stat(pid)
    return None if state in _GONE else ProcessId(pid, start_time)


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process runs. True if unknown, so that nothing is undone under it."""
    try:
        return identify(process.pid) == process
    except StateError:
        return True


def spawn(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ProcessId:
    """Start a program in a new session; it outlives this process, and appends to the file `output`.

    posix_spawn gives the child the mount namespace of the calling thread. Raises: OSError; StateError although the
    program runs.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        arguments[0],
        list(arguments),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
    )
    return ProcessId(pid, _stat(pid)[1])


def reap(pid: int) -> int | None:
    """Return the exit code of a child, negative after a signal; None if unknown."""
    with suppress(ChildProcessError):
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    return None


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to exactly this process, if it still runs."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        refuse_own_limit(f"{_PROC}/{process.pid}", error)
        return
    try:
        # Checked after opening, so the descriptor is certainly for this process.
        if identify(process.pid) == process:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> tuple[ProcessId, ...]:
    """Wait, reaping children, and return the processes that remain."""
    deadline, left = time.monotonic() + timeout_s, tuple(processes)
    while True:
        for process in left:
            reap(process.pid)
        left = tuple(process for process in left if identify(process.pid) == process)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)


def end(processes: Collection[ProcessId], patience_s: float) -> None:
    """Send SIGTERM, and SIGKILL after `patience_s` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            send_signal(process, number)
        processes = wait_gone(processes, patience_s)
        if not processes:
            return


def users_of(pipe_directory: str) -> tuple[ProcessId, ...]:
    """Return the control daemon and the servers of a pipe directory, oldest first, without clients and queries.

    They are found by their environment.
    """
    found = [
        identity
        for pid in _pids()
        if _mps_program(pid) is not None
        and _variable(pid, PIPE_VARIABLE) == pipe_directory
        and (identity := identify(pid)) is not None
        and pid != os.getpid()
    ]
    return tuple(sorted(found, key=lambda process: process.start_time))


def users_by_directory(pipe_directories: Iterable[str]) -> dict[str, set[int]]:
    """Return the user IDs of the clients of each pipe directory.

    A client's environment names the directory by a path in its container.
    """
    wanted = {}
    for directory in pipe_directories:
        with suppress(OSError):
            wanted[_file(directory)] = directory
    found: dict[str, set[int]] = {}
    if not wanted:
        return found
    for pid in _pids():
        path = _variable(pid, PIPE_VARIABLE)
        if path is None or _mps_program(pid) is not None:
            continue
        with suppress(OSError, ValueError):
            named = wanted.get(_file(f"{_PROC}/{pid}/root{os.path.abspath(path)}"))  # noqa: PTH100
            user = _user(pid)
            if named is not None and user is not None:
                found.setdefault(named, set()).add(user)
    return found


def is_control_daemon(process: ProcessId, pipe_directory: str) -> bool:
    pid = process.pid
    is_daemon = _mps_program(pid) == "control" and _variable(pid, PIPE_VARIABLE) == pipe_directory
    return is_daemon and is_alive(process)


def _mps_program(pid: int) -> Literal["control", "server"] | None:
    """Return which MPS program the process is, or is about to run from a script; queries do not count."""
    arguments = _read(f"{_PROC}/{pid}/cmdline").split(b"\0")
    names = {argument.rpartition(b"/")[2] for argument in arguments}
    if b"nvidia-cuda-mps-server" in names:
        return "server"
    is_daemon = b"-f" in arguments or b"-d" in arguments
    return "control" if is_daemon and b"nvidia-cuda-mps-control" in names else None


def _variable(pid: int, name: str) -> str | None:
    prefix = f"{name}=".encode()
    entries = _read(f"{_PROC}/{pid}/environ").split(b"\0")
    return next((os.fsdecode(entry[len(prefix) :]) for entry in entries if entry.startswith(prefix)), None)


def _user(pid: int) -> int | None:
    for line in _read(f"{_PROC}/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return None


def _file(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116
    return found.st_dev, found.st_ino


def _pids() -> Iterator[int]:
    try:
        names = os.listdir(_PROC)  # noqa: PTH208  avoids Path objects
    except OSError as error:
        raise state_error("read", Path(_PROC), error) from error
    yield from (int(name) for name in names if name.isdigit())


def _stat(pid: int) -> tuple[str, int]:
    """Return (state letter, start time); ("X", 0) if there is no process."""
    _, _, tail = _read(f"{_PROC}/{pid}/stat").rpartition(b")")
    parts = tail.split()
    if len(parts) <= _START_TIME_FIELD:
        return "X", 0
    state = parts[0].decode()
    # The first thread of a killed process may be a zombie while other threads still exit and hold the GPU.
    if state == "Z" and int(parts[_THREADS_FIELD]) > 1:
        state = _ENDING
    return state, int(parts[_START_TIME_FIELD])


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - runs for every process of the host
            return file.read()
    except OSError as error:
        refuse_own_limit(path, error)
        return b""
