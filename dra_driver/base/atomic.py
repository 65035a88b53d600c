"""Writing a file so that a reader, a crash or a power cut sees the old content or the new, never a part. `WRITES` knows
how this process's writes ended: in which directories the last one failed, and which do not return.
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
"""Others are faults of one file, such as a directory in its place."""


class WriteOutcomes:
    """How the last write in each directory ended, and which writes are under way. For many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[Path, float]] = {}
        self._failed: dict[Path, str] = {}

    @contextmanager
    def writing(self, directory: Path, *, is_whole: bool = True) -> Iterator[None]:
        """Around each write in a directory. One that is not whole opens, removes or syncs a file: if it succeeds, a
        write may still fail, so that ends no problem. Raises: the StateError of the write."""
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
        """A directory at or below `top` in which the last write failed, and the error; None if there is none."""
        with self._lock:
            return next(((at, text) for at, text in self._failed.items() if at.is_relative_to(top)), None)

    def forget(self, directory: Path) -> None:
        """The directory is gone, so nothing is to be written there."""
        with self._lock:
            self._failed.pop(directory, None)

    def hanging_in(self, top: Path) -> float | None:
        """For how many seconds the oldest write at or below `top` has been under way, None if there is none."""
        with self._lock:
            began = [since for at, since in self._under_way.values() if at.is_relative_to(top)]
        return time.monotonic() - min(began) if began else None


WRITES = WriteOutcomes()
"""Those of this process."""


TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = ".unreadable"
# With these errors no later try can read the file either. Others, such as too many open files, pass.
UNREADABLE = frozenset({errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENXIO})


Stamp = tuple[int, int, int]
"""Inode, size and time of the last change in nanoseconds: what differs when a file was written anew."""

NO_STAMP: Stamp = (0, 0, 0)
"""The stamp of no file."""

_CLOCK_OF_FILES = 5  # CLOCK_REALTIME_COARSE, which the module time does not name
_SECOND_NS = 10**9

_numbers = itertools.count(time.time_ns())
"""Unique within the process; the clock keeps a later process of the same ID from an abandoned name."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; raise it or free some space",
    errno.EROFS: "the file system is read-only; remount it writable",
    errno.EACCES: "permission was denied; run as root and check the directory's mode",
    errno.EPERM: "permission was denied; run as root and check the directory's mode",
    errno.ENOENT: "the directory does not exist; create it or check the mount",
    errno.EEXIST: "a file is in its place; remove it",
    errno.EISDIR: "what is in its place is not a regular file; remove it",
    errno.ELOOP: "what is in its place is not a regular file; remove it",
    errno.ENXIO: "what is in its place is not a regular file; remove it",
    errno.ENOTDIR: "a part of the path is not a directory; remove what is in its place",
}


def state_error(action: str, path: Path, error: OSError) -> StateError:
    """One sentence for a failed file operation: what, where, and what to do about it."""
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    return StateError(f"cannot {action} {path}: {remedy}")


def write_atomically(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    durable: bool = True,
    whole: bool = True,
) -> None:
    """Replace `path` by `content`.

    The temporary file lies in the same directory: a rename works only within one file system, and a watcher of the
    directory sees it. Its writer holds a lock on it, which the kernel releases if the writer is killed.
    `whole` syncs the content before the rename; without it a power cut may leave an empty file under the name.
    `durable` also syncs the directory; without it a power cut may bring the old content back. Raises: StateError.
    """
    with WRITES.writing(path.parent):
        _write(path, content, mode, durable=durable, whole=whole)


def _write(path: Path, content: bytes, mode: int, *, durable: bool, whole: bool) -> None:
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
            name.replace(path)
        finally:
            os.close(descriptor)  # with the lock
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            Path(name).unlink()
        raise state_error("write", path, error) from error


def _locked_temporary(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside `path`, and its descriptor. Raises: OSError."""
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
        os.close(descriptor)  # `clear_abandoned` removed it before it was locked


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def point_link(link: Path, target: str) -> None:
    """Have a symbolic link that leads to `target`; readers see the old one or the new one. Raises: OSError."""
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
    """Make the directory's own entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int, *, durable: bool = False) -> None:
    """Create the directory and its parents where they are missing.

    Parents are readable for root's group too, as the kubelet's own are. `durable` makes the directory survive a power
    cut; without it no file in the directory does. Raises: StateError.
    """
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
    """Make removals from the directory survive a power cut. Raises: StateError."""
    with WRITES.writing(directory, is_whole=False):
        try:
            sync_directory(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise state_error("sync", directory, error) from error


def clear_abandoned(directory: Path, pattern: str = f".*{TEMPORARY_SUFFIX}") -> None:
    """Remove the temporary files that killed writers left in the directory: those that match and that no process has
    locked. A file that cannot be removed stays; it does no harm."""
    with suppress(OSError):  # while the directory cannot be listed
        for path in directory.glob(pattern):
            with suppress(
                OSError
            ):  # it is being written, another instance removed it, or the disk is read-only
                _clear(path)


def _clear(path: Path) -> None:
    descriptor = open_plain(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


stamp_of: Callable[[os.stat_result], Stamp] = attrgetter("st_ino", "st_size", "st_ctime_ns")
"""The stamp in a file's status."""


def stamp_at(path: Path | str) -> Stamp:
    """The stamp of what is at the path, a link itself. Raises: OSError."""
    return stamp_of(os.lstat(path))


def stamp_or_none(path: Path | str) -> Stamp | None:
    """The stamp of the file to which the path leads; None while there is none."""
    try:
        return stamp_of(os.stat(path))  # noqa: PTH116
    except OSError:
        return None


def is_settled(time_ns: int) -> bool:
    """Whether a change from now on gives a file or directory another time than this one: it is older than a tick of the
    clock that such times come from, or that clock was set back since. Some file systems keep whole seconds."""
    tick_ns, now = 0 if time_ns % _SECOND_NS else _SECOND_NS, time.clock_gettime_ns(_CLOCK_OF_FILES)
    # A newer kernel's times may be a tick of some milliseconds ahead of its clock.
    return time_ns + tick_ns < now or time_ns > now + _SECOND_NS


def set_aside(path: Path, what: str, stamp: Stamp) -> Path | None:
    """Rename what cannot be read, so that a person can look at it; returns the new path.

    None if it is not that of `stamp` any more: somebody wrote it anew or renamed it first. Raises: StateError that
    names `what`.
    """
    aside = path.with_name(f"{path.name.removesuffix(QUARANTINE)}{QUARANTINE}-{time.time_ns()}")
    try:
        if stamp_at(path) != stamp:
            return None
        path.rename(aside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise state_error(f"set aside the unreadable {what}", path, error) from error
    return aside


def open_plain(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file, as `os.open`. Nothing else that is in its place is read, written, followed or waited for.

    Raises: OSError; one of UNREADABLE for what is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR, "it is not a regular file")
    return descriptor


def read_plain(path: Path) -> bytes:
    """The content of a regular file. Raises: OSError, as `open_plain`."""
    with open(open_plain(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read()


def read_or_none(path: Path) -> bytes | None:
    """The content of a regular file; None if there is none, or if no later try could read it. Raises: StateError."""
    try:
        return read_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise state_error("read", path, error) from error


def remove_file(path: Path) -> bool:
    """Remove a file; returns whether there was one. Raises: StateError."""
    with WRITES.writing(path.parent, is_whole=False):
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise state_error("remove", path, error) from error
    return True
