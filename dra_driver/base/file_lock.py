"""One lock: among the threads of this process, and against other processes on the same file.

Open-file-description locks are used, because the upstream helper's lock is one and `flock` does not
interlock with it, and because they belong to the descriptor: a crash releases them.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.base.atomic import UNREADABLE, WRITES, open_plain, state_error
from dra_driver.errors import RetryableError

_POLL_S = 0.005
_LOOK_S = 0.1
"""How often it is looked whether somebody still wants the lock."""
LOCK_LAYOUT = "hhqqi4x"
"""`struct flock` on 64-bit Linux."""
WHOLE_FILE_WRITE_LOCK = struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class LockBusyError(RetryableError):
    """Somebody else holds the lock."""


def byte_lock(offset: int, kind: int = fcntl.F_WRLCK) -> bytes:
    """The lock on one byte, which need not be there, or with F_UNLCK its end."""
    return struct.pack(LOCK_LAYOUT, kind, os.SEEK_SET, offset, 1, 0)


@contextmanager
def hold_file(
    path: Path,
    among_threads: threading.Lock,
    deadline: float,
    what: str,
    lock: bytes = WHOLE_FILE_WRITE_LOCK,
    has_left: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Hold the lock and yield the file's descriptor, open for reading and writing.

    The file is created where missing and must never be removed: a lock file that is unlinked while another
    process waits for it would no longer exclude anybody.
    Raises: LockBusyError that says that `what` is busy, if `deadline` (time.monotonic()) passes, or while whoever
    wants it `has_left`; StateError.
    """
    if not among_threads.acquire(blocking=False):
        _wait_for_thread(among_threads, deadline, what, has_left)
    try:
        descriptor = _open(path)
        try:
            _lock(descriptor, path, deadline, what, lock, has_left)
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        among_threads.release()


def _wait_for_thread(
    lock: threading.Lock, deadline: float, what: str, has_left: Callable[[], bool] | None
) -> None:
    step = _LOOK_S if has_left is not None else math.inf
    while True:
        left = deadline - time.monotonic()
        if lock.acquire(timeout=max(0.0, min(left, step))):
            return
        if left <= step or (has_left is not None and has_left()):
            raise _busy(what)


def _open(path: Path) -> int:
    with WRITES.writing(path.parent, is_whole=False):
        try:
            return open_plain(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise state_error("open the lock file", path, error) from error


def _lock(
    descriptor: int, path: Path, deadline: float, what: str, lock: bytes, has_left: Callable[[], bool] | None
) -> None:
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise state_error("lock", path, error) from error
            if time.monotonic() >= deadline or (has_left is not None and has_left()):
                raise _busy(what) from error
            time.sleep(_POLL_S)
        else:
            return


def is_locked(path: Path, lock: bytes = WHOLE_FILE_WRITE_LOCK, own: int | None = None) -> bool:
    """Whether somebody's lock is in the way of this one; asked without taking it, which others would see. The lock of
    the descriptor `own` does not count. What is no regular file is nobody's. Raises: StateError."""
    try:
        descriptor = open_plain(path, os.O_RDONLY) if own is None else os.dup(own)
    except OSError as error:
        if error.errno in (errno.ENOENT, *UNREADABLE):
            return False
        raise state_error("open the lock file", path, error) from error
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock)
    finally:
        os.close(descriptor)
    kind: int = struct.unpack(LOCK_LAYOUT, found)[0]
    return kind != fcntl.F_UNLCK


def _busy(what: str) -> LockBusyError:
    return LockBusyError(f"{what} is busy with another claim's prepare or unprepare; it will be retried")


class UseMark:
    """A byte of a lock file that all who use a thing hold at the same time, so that others see whether somebody does.
    For one thread at a time; a crash releases it."""

    def __init__(self, path: Path, byte: int = 0) -> None:
        self._path = path
        self._byte = byte
        self._descriptor: int | None = None

    def following(self) -> UseMark:
        """The mark on the next byte, for another use."""
        return UseMark(self._path, self._byte + 1)

    def hold(self) -> None:
        """Begin to hold it; nothing happens if this object does. Raises: StateError."""
        if self._descriptor is not None:
            return
        descriptor = _open(self._path)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, byte_lock(self._byte, fcntl.F_RDLCK))
        except OSError as error:
            os.close(descriptor)
            raise state_error("lock", self._path, error) from error
        self._descriptor = descriptor

    def let_go(self) -> None:
        """Hold it no more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def is_held(self) -> bool:
        """Whether anybody holds it. Raises: StateError."""
        return is_locked(self._path, byte_lock(self._byte))

    def others_hold_it(self) -> bool:
        """Whether anybody but this object holds it. Raises: StateError."""
        return is_locked(self._path, byte_lock(self._byte), self._descriptor)
