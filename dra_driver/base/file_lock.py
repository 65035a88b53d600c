"""A lock that excludes other threads and processes, through a file. File errors are raised as StateError.

A crash releases these open-file-description locks. Kubernetes' helper for DRA drivers uses them too; `flock` would not
exclude it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.base.atomic import UNREADABLE, WRITES, open_plain, state_error
from dra_driver.errors import RetryableError

_POLL_S = 0.005
LOCK_LAYOUT = "hhqqi4x"
"""`struct flock` on 64-bit Linux."""
WHOLE_FILE_WRITE_LOCK = struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class LockBusyError(RetryableError):
    """Another thread or process holds the lock."""


def byte_lock(offset: int, kind: int = fcntl.F_WRLCK) -> bytes:
    """Return the lock on one byte, which may lie past the end of the file."""
    return struct.pack(LOCK_LAYOUT, kind, os.SEEK_SET, offset, 1, 0)


@contextmanager
def hold_file(
    path: Path,
    deadline: float,
    busy: str,
    lock: bytes = WHOLE_FILE_WRITE_LOCK,
) -> Iterator[int]:
    """Hold the lock; yields the file's descriptor.

    The file must never be removed: a lock on a removed file excludes no other process.

    Raises: LockBusyError with the text `busy`, if `deadline` (time.monotonic()) passes.
    """
    descriptor = _open(path)
    try:
        _lock(descriptor, path, deadline, busy, lock)
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    with WRITES.writing(path.parent, is_whole=False):
        try:
            return open_plain(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise state_error("open the lock file", path, error) from error


def _lock(descriptor: int, path: Path, deadline: float, busy: str, lock: bytes) -> None:
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise state_error("lock", path, error) from error
            if time.monotonic() >= deadline:
                raise LockBusyError(busy) from error
            time.sleep(_POLL_S)
        else:
            return


def is_locked(path: Path, lock: bytes = WHOLE_FILE_WRITE_LOCK, own: int | None = None) -> bool:
    """Whether a conflicting lock exists, without taking the lock, because other processes would notice.

    A lock held through the descriptor `own` is ignored.
    """
    try:
        descriptor = open_plain(path, os.O_RDONLY) if own is None else os.dup(own)
    except OSError as error:
        if error.errno in {errno.ENOENT, *UNREADABLE} - {errno.EIO}:
            return False
        raise state_error("open the lock file", path, error) from error
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock)
    finally:
        os.close(descriptor)
    kind: int = struct.unpack(LOCK_LAYOUT, found)[0]
    return kind != fcntl.F_UNLCK


class UseMark:
    """A lock on one byte of a file that every process holds while it uses a resource. Not thread-safe."""

    def __init__(self, path: Path, byte: int = 0) -> None:
        self._path = path
        self._byte = byte
        # Programs that inherit the descriptor hold the mark too. None while this object does not hold it.
        self.descriptor: int | None = None

    def hold(self) -> None:
        if self.descriptor is not None:
            return
        descriptor = _open(self._path)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, byte_lock(self._byte, fcntl.F_RDLCK))
        except OSError as error:
            os.close(descriptor)
            raise state_error("lock", self._path, error) from error
        self.descriptor = descriptor

    def release(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def is_held(self) -> bool:
        """Whether anyone other than this object holds the mark."""
        return is_locked(self._path, byte_lock(self._byte), self.descriptor)
