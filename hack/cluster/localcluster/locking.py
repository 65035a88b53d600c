"""One program at a time on one directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster.errors import ClusterError


@contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file ``path``; with ``wait`` queue for it instead of refusing.

    The file may be deleted by its holder (``down`` removes the whole directory),
    so a lock counts only if the path still leads to the file that was locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, path, wait)
            if _leads_to(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode() or "unknown"
        raise ClusterError(
            f"Process {holder} is at work on this cluster (lock {path}): wait until it ends."
        ) from None


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
