"""The machine file: read cheaply, changed under a lock that all processes share.

Readers take no lock: a rename replaces the file, and its modification time grows with every change. So one stat() shows
whether the parsed copy is current.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.errors import StateError
from dra_driver.simulator.state import FORMAT, State, decode, encode

STATE_FILE = "machine.json"
LOCK_FILE = "machine.lock"
_MTIME_STEP_NS = 1_000_000
_COARSE_STEP_NS = 2_000_000_000

AfterChange = Callable[[State, State], None]


class Store:
    """The one way to the machine file of a simulator directory."""

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
        """The machine as it is now. Costs one stat() while nothing changes."""
        try:
            mtime = os.stat(self._path).st_mtime_ns  # noqa: PTH116 - the hot path of every NVML call
        except FileNotFoundError as error:
            raise StateError(
                f"the simulated machine at {self.directory} is gone: {self.path.name} does not exist; "
                "create it again with `simulate create`"
            ) from error
        cached = self._cached
        if cached is not None and mtime == cached[0]:
            return cached[1]
        with self._lock:
            return self._load()

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
            state = decode(raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(
                f"the machine file {self.path} cannot be read ({error}); remove the directory and create it again"
            ) from error
        if state.format != FORMAT:
            raise StateError(
                f"the machine file {self.path} has format {state.format}, this version knows {FORMAT}; "
                "remove the directory and create it again"
            )
        return state

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive over threads and processes; may be nested."""
        with self._lock:
            if self._depth == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._lock_path, flags, 0o666)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    os.close(self._descriptor)

    @contextmanager
    def change(self, before_write: AfterChange | None = None) -> Iterator[State]:
        """A private copy to change; written when the block ends without an error.

        `before_write(old, new)` runs under the lock, before other processes can see the new state.
        """
        with self.locked():
            raw = self.path.read_bytes()
            old, new = self._load(), self._parse(raw)
            yield new
            new.version = old.version + 1
            for computed in ("by_uuid", "present", "shown"):
                new.__dict__.pop(computed, None)
            if before_write is not None:
                before_write(old, new)
            self.write(new)

    def write(self, state: State) -> None:
        """Replace the file. The caller holds the lock."""
        temporary = self.path.with_suffix(".json.new")
        temporary.write_text(encode(state))
        before = self._cached[0] if self._cached is not None else 0
        mtime = max(time.time_ns(), before + _MTIME_STEP_NS)
        os.utime(temporary, ns=(mtime, mtime))
        if temporary.stat().st_mtime_ns <= before:  # for a file system that keeps whole seconds only
            os.utime(temporary, ns=(mtime, before + _COARSE_STEP_NS))
        mtime = temporary.stat().st_mtime_ns
        temporary.replace(self.path)
        self._cached = (mtime, state)
