"""Locks on physical GPUs, within this process and against a second instance of the plugin.

Open-file-description locks are used, because the upstream helper's lock is one and `flock` does not
interlock with it, and because they belong to the descriptor: a crash releases them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dra_driver.errors import RetryableError
from dra_driver.state.files import make_directory, state_error

_POLL_S = 0.005
_WHOLE_FILE_WRITE_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class GpuLocks:
    """One lock a GPU UUID. Files lie in `directory`, one a GPU, and are never removed: a lock file that is
    unlinked while another process waits for it would no longer exclude anybody."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> Iterator[None]:
        """Hold the locks of all the GPUs, taken in one order so that no two callers wait for each other.

        Raises: RetryableError if they cannot be had within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with ExitStack() as stack:
            for uuid in sorted(set(gpu_uuids)):
                stack.enter_context(self._hold_one(uuid, deadline))
            yield

    @contextmanager
    def _hold_one(self, uuid: str, deadline: float) -> Iterator[None]:
        with self._guard:
            lock = self._locks.setdefault(uuid, threading.Lock())
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _busy(uuid)
        try:
            descriptor = self._open_file(uuid)
            try:
                self._lock_file(descriptor, uuid, deadline)
                yield
            finally:
                os.close(descriptor)
        finally:
            lock.release()

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}.lock"

    def _open_file(self, uuid: str) -> int:
        path = self._file(uuid)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise state_error("open the lock file", path, error) from error

    def _lock_file(self, descriptor: int, uuid: str, deadline: float) -> None:
        while True:
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE_WRITE_LOCK)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise state_error("lock", self._file(uuid), error) from error
                if time.monotonic() >= deadline:
                    raise _busy(uuid) from error
                time.sleep(_POLL_S)
            else:
                return


def _busy(uuid: str) -> RetryableError:
    return RetryableError(f"GPU {uuid} is busy with another claim's prepare or unprepare; it will be retried")
