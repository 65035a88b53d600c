"""Atomic file writes: after a crash or a power cut, a reader sees the old content or the new content, never a mix.

File errors are raised as StateError, unless a docstring names another error.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path

from dra_driver.errors import StateError

_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})


class WriteOutcomes:
    """The last write failure of each directory, and the writes in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[Path, float]] = {}
        self._failed: dict[Path, str] = {}

    @contextmanager
    def writing(self, directory: Path, *, is_whole: bool = True) -> Iterator[None]:
        """Track a write in a directory. Success of a write that is not whole (open, remove, sync) clears no earlier
        failure.
        """
        number = next(self._numbers)
        with self._lock:
            self._under_way[number] = (directory, time.monotonic())
        failure, is_disk = None, False
        try:
            yield
        except StateError as error:
            failure = str(error)
            is_disk = getattr(error.__cause__, "errno", None) in _OF_THE_DISK
            raise
        finally:
            with self._lock:
                del self._under_way[number]
                if failure is None and is_whole:
                    self._failed.pop(directory, None)
                elif failure is not None and is_disk:
                    self._failed[directory] = failure

    def failed_in(self, top: Path) -> tuple[Path, str] | None:
        with self._lock:
            return next(((at, text) for at, text in self._failed.items() if at.is_relative_to(top)), None)

    def forget(self, directory: Path) -> None:
        with self._lock:
            self._failed.pop(directory, None)

    def hanging_in(self, top: Path) -> float | None:
        """Return the age in seconds of the oldest write in progress at or below `top`."""
        with self._lock:
            began = [since for at, since in self._under_way.values() if at.is_relative_to(top)]
        return time.monotonic() - min(began) if began else None


WRITES = WriteOutcomes()


TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = ".unreadable"
# Errors that a retry cannot fix. Others, such as too many open files, are temporary.
UNREADABLE = frozenset({errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENXIO})


_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


Stamp = tuple[int, int, int]
"""Inode, size and change time in nanoseconds: different for a rewritten file."""

_CLOCK_OF_FILES = 5  # CLOCK_REALTIME_COARSE; Python's `time` module has no name for it
_SECOND_NS = 10**9

_numbers = itertools.count(time.time_ns())
"""They begin with the time, so a later process with this PID uses others."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; raise it or free some space",
    errno.EROFS: "the file system is read-only; remount it writable",
    errno.EACCES: "permission was denied; run as root and check the directory's mode",
    errno.EPERM: "permission was denied; run as root and check the directory's mode",
    errno.ENOENT: "the directory does not exist; create it or check the mount",
    errno.EEXIST: "a file with this name exists; remove it",
    errno.EISDIR: "the path exists, but is not a regular file; remove it",
    errno.ELOOP: "the path exists, but is not a regular file; remove it",
    errno.ENXIO: "the path exists, but is not a regular file; remove it",
    errno.ENOTDIR: "a parent of the path is not a directory; remove or rename that parent",
}


def state_error(action: str, path: Path, error: OSError) -> StateError:
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    return StateError(f"cannot {action} {path}: {remedy}")


def refuse_own_limit(path: Path | str, error: OSError) -> None:
    """Raise StateError if this process or its node is out of open files or memory: the path may still exist."""
    if error.errno in _OWN_LIMITS:
        raise state_error("read", Path(path), error) from error


def write_atomically(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    durable: bool = True,
    whole: bool = True,
    permit: Callable[[], object] = lambda: None,
) -> None:
    """Replace `path` with `content`.

    `whole` syncs the content before the rename; without it, a power cut may leave an empty file. `durable` also syncs
    the directory; without it, a power cut may restore the old content. `permit` is called right before the rename,
    because a sync may hang for minutes; its StateError keeps the old file.
    """
    with WRITES.writing(path.parent):
        _write(path, content, mode, permit, durable=durable, whole=whole)


def _write(
    path: Path, content: bytes, mode: int, permit: Callable[[], object], *, durable: bool, whole: bool
) -> None:
    try:
        name, descriptor = _locked_temporary(path, mode)
    except OSError as error:
        raise state_error("write", path, error) from error
    try:
        try:
            _write_all(descriptor, content)
            os.fchmod(descriptor, mode)
            if durable or whole:
                os.fsync(descriptor)
            permit()
            name.replace(path)
        finally:
            os.close(descriptor)  # releases the lock too
        if durable:
            sync_directory(path.parent)
    except (OSError, StateError) as error:
        with suppress(OSError):
            name.unlink()
        if isinstance(error, StateError):
            raise
        raise state_error("write", path, error) from error


def _locked_temporary(path: Path, mode: int) -> tuple[Path, int]:
    while True:
        name = path.parent / f".{path.name}.{os.getpid()}-{next(_numbers)}{TEMPORARY_SUFFIX}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_there = os.fstat(descriptor).st_nlink > 0
        except BaseException:
            os.close(descriptor)
            raise
        if is_there:
            return name, descriptor
        os.close(descriptor)  # `clear_abandoned` removed the file before it was locked


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def replace_symlink(link: Path, target: str) -> None:
    """Point a symbolic link at `target` atomically. Raises: OSError."""
    with suppress(OSError):
        if str(link.readlink()) == target:
            return
    new = link.with_name(f".{link.name}.{os.getpid()}-{next(_numbers)}")
    new.symlink_to(target)
    try:
        new.replace(link)
    except OSError:
        new.unlink()
        raise


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int, *, durable: bool = False) -> None:
    """Create the directory and its missing parents, which root's group can also read, like the kubelet's own."""
    try:
        if not durable and path.is_dir():
            return
        missing = [parent for parent in path.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=mode | 0o050, exist_ok=True)
        path.mkdir(mode=mode, exist_ok=True)
        if durable:
            for made in (*missing, path):
                sync_directory(made.parent)
    except OSError as error:
        raise state_error("create the directory", path, error) from error


def sync_removals(directory: Path) -> None:
    with WRITES.writing(directory, is_whole=False):
        try:
            sync_directory(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise state_error("sync", directory, error) from error


def clear_abandoned(directory: Path, pattern: str = f".*{TEMPORARY_SUFFIX}") -> None:
    """Remove temporary files that match `pattern` and that no writer locks. Errors are ignored."""
    with suppress(OSError):  # if the directory cannot be listed
        for path in directory.glob(pattern):
            with suppress(
                OSError
            ):  # being written, already removed by the other instance, or on a read-only disk
                _clear(path)


def _clear(path: Path) -> None:
    descriptor = open_plain(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


stamp_of: Callable[[os.stat_result], Stamp] = attrgetter("st_ino", "st_size", "st_ctime_ns")


def stamp_or_none(path: Path | str) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))  # noqa: PTH116
    except OSError:
        return None


def is_settled(time_ns: int) -> bool:
    """Whether any later change of a file gets a different time than `time_ns`.

    File times come from a coarse clock: this is False during its current tick (one second on file systems that store
    whole seconds). A time more than a second ahead is settled: the clock was set back.
    """
    tick_ns, now = 0 if time_ns % _SECOND_NS else _SECOND_NS, time.clock_gettime_ns(_CLOCK_OF_FILES)
    # Times of newer kernels may be a few milliseconds ahead of this clock.
    return time_ns + tick_ns < now or time_ns > now + _SECOND_NS


def set_aside(path: Path, what: str) -> Path | None:
    """Rename an unreadable file for inspection; returns the new path, or None if the file is gone."""
    aside = path.with_name(f"{path.name.removesuffix(QUARANTINE)}{QUARANTINE}-{time.time_ns()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise state_error(f"set aside the unreadable {what}", path, error) from error
    return aside


def open_plain(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file, not a link, like `os.open`; never wait for a pipe or device.

    Raises: OSError, with an errno in UNREADABLE if the path is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR, "it is not a regular file")
    return descriptor


def read_plain(path: Path) -> bytes:
    """Raise OSError, like `open_plain`."""
    with open(open_plain(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read()


def read_or_none(path: Path) -> bytes | None:
    """Return None for a missing or permanently unreadable file."""
    try:
        return read_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise state_error("read", path, error) from error


def remove_file(path: Path) -> bool:
    """Return whether the file existed."""
    with WRITES.writing(path.parent, is_whole=False):
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise state_error("remove", path, error) from error
    return True
