"""The files of a machine: its state, its open NVML sessions, and the settings that nvidia-smi changes.

The machine file is changed under a lock. Readers take no lock: a rename replaces the file, and its modification time
grows with every change.

The real driver counts a session as a client of every GPU, and then refuses some changes. Here each session is a
locked file, so that sessions end with their process.

The settings are files inside the host root: nvidia-smi, here a shell script, finds them relative to its own path, even
after a chroot. The machine applies what nvidia-smi did when a session opens or closes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dra_driver.errors import StateError
from dra_driver.simulator.machine_state import State, decode, encode

STATE_FILE = "machine.json"
LOCK_FILE = "machine.lock"
_MTIME_STEP_NS = 1_000_000
_COARSE_STEP_NS = 2_000_000_000

_PROCESS = uuid.uuid4().hex[:8]  # process IDs of different PID namespaces may be equal
_numbers = itertools.count(1)
_written = threading.Condition()
COMPUTE_MODE = "compute-mode"
TIMESLICE = "timeslice"
RESET = "reset"
PERSISTENCE = "persistence"
"""1: switched on, 2: switched off."""


class Store:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / STATE_FILE
        self._path = str(self.path)
        self._lock_path = str(directory / LOCK_FILE)
        self._lock = threading.RLock()
        self._cached: tuple[int, State] | None = None
        self._depth = 0
        self._descriptor = -1

    def exists(self) -> bool:
        return self.path.is_file()

    def current(self) -> State:
        """Return the machine's state. Costs one stat() while nothing changes."""
        mtime, cached = self._mtime(), self._cached
        if cached is not None and mtime == cached[0]:
            return cached[1]
        with self._lock:
            return self._load()

    def _mtime(self) -> int:
        try:
            return os.stat(self._path).st_mtime_ns  # noqa: PTH116 - the hot path of every NVML call
        except FileNotFoundError as error:
            raise self._gone() from error

    def wait_changed(self, state: State, seconds: float) -> None:
        """Wait until this process has changed the machine since `state` was read."""
        cached = self._cached
        with _written:
            # A writer holds the lock of its store, so the file is not loaded here.
            if cached is not None and cached[1] is state and self._mtime() == cached[0]:
                _written.wait(seconds)

    def _gone(self) -> StateError:
        return StateError(
            f"the simulated machine at {self.directory} is gone: {self.path.name} does not exist; "
            "create it again with `simulate create`"
        )

    def _load(self) -> State:
        with self.path.open("rb") as file:
            mtime = os.fstat(file.fileno()).st_mtime_ns
            cached = self._cached
            if cached is not None and mtime == cached[0]:
                return cached[1]
            raw = file.read()
        state = self._parse(raw)
        self._cached = (mtime, state)
        return state

    def _parse(self, raw: bytes) -> State:
        try:
            return decode(raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(
                f"the machine file {self.path} cannot be read ({error}); remove the directory and create it again"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the machine's lock, which excludes other threads and processes; reentrant."""
        with self._lock:
            if self._depth == 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                try:
                    self._descriptor = os.open(self._lock_path, flags, 0o666)
                except FileNotFoundError as error:
                    raise self._gone() from error
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    os.close(self._descriptor)

    @contextmanager
    def change(self, before_write: Callable[[State, State], None]) -> Iterator[State]:
        """Yield a private copy of the state to change, which is written if the block succeeds.

        `before_write(old, new)` runs under the lock, before other processes can see the new state.
        """
        with self.locked():
            raw = self.path.read_bytes()
            old, new = self._load(), self._parse(raw)
            yield new
            new.version = old.version + 1
            for computed in ("by_uuid", "present", "shown"):
                new.__dict__.pop(computed, None)
            before_write(old, new)
            self.write(new)

    def write(self, state: State) -> None:
        temporary = self.path.with_suffix(".json.new")
        temporary.write_text(encode(state))
        before = self._cached[0] if self._cached is not None else 0
        mtime = max(time.time_ns(), before + _MTIME_STEP_NS)
        os.utime(temporary, ns=(mtime, mtime))
        if temporary.stat().st_mtime_ns <= before:  # on file systems with timestamps in whole seconds
            os.utime(temporary, ns=(mtime, before + _COARSE_STEP_NS))
        mtime = temporary.stat().st_mtime_ns
        temporary.replace(self.path)
        self._cached = (mtime, state)
        with _written:
            _written.notify_all()


class Session:
    """One open NVML session, with a file that it locks, unless the directory is not writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def end(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class Sessions:
    """The session files, named `<mark of the process>.<process ID>.<number>.<name>`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, name: str) -> Session:
        return Session(self._directory / f"{_PROCESS}.{os.getpid()}.{next(_numbers)}.{name}")

    def names(self, *, with_own: bool) -> list[str]:
        """Return the open sessions, such as `dcgm (process 4711)`."""
        try:
            paths = sorted(self._directory.iterdir())
        except OSError:
            return []
        found = []
        for path in paths:
            mark, pid, _, name = path.name.split(".", 3)
            if _is_open(path) and (with_own or mark != _PROCESS):
                found.append(f"{name} (process {pid})")
        return list(dict.fromkeys(found))


def _is_open(path: Path) -> bool:
    """Whether a process holds the file. Removes a file that no process holds."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class Policies:
    """`<host root>/var/lib/nvidia-simulator/<setting>/<GPU UUID>`; a missing file means the default, 0."""

    def __init__(self, host_root: Path) -> None:
        self.directory = host_root / "var/lib/nvidia-simulator"

    def prepare(self) -> None:
        for setting in (COMPUTE_MODE, TIMESLICE, RESET, PERSISTENCE):
            (self.directory / setting).mkdir(parents=True, exist_ok=True)

    def get(self, setting: str, uuid: str) -> int:
        try:
            with open(f"{self.directory}/{setting}/{uuid}", "rb") as file:  # noqa: PTH123 - on the path of NVML calls
                return int(file.read() or 0)
        except (OSError, ValueError):
            return 0

    def set(self, setting: str, uuid: str, value: int) -> None:
        path = self.directory / setting / uuid
        if value == 0:
            path.unlink(missing_ok=True)
            return
        temporary = path.with_name(f".{uuid}.new")
        temporary.write_text(f"{value}\n")
        temporary.replace(path)

    def take(self, setting: str, uuid: str) -> int:
        """Return and forget what nvidia-smi did to the GPU since the last call; 0 for nothing."""
        value = self.get(setting, uuid)
        if value:
            self.set(setting, uuid, 0)
        return value

    def forget(self, uuid: str) -> None:
        for setting in (COMPUTE_MODE, TIMESLICE):
            self.set(setting, uuid, 0)

    def reset(self) -> None:
        for setting in (COMPUTE_MODE, TIMESLICE, RESET, PERSISTENCE):
            shutil.rmtree(self.directory / setting, ignore_errors=True)
        self.prepare()
