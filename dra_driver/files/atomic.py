"""Writing a file so that a reader, a crash or a power cut sees the old content or the new, never a part."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.errors import StateError

_log = structlog.get_logger(__name__)

TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = ".unreadable"
# With these errors no later try can read the file either. Others, such as too many open files, pass.
UNREADABLE = frozenset({errno.EIO, errno.EISDIR, errno.ELOOP})

Stamp = tuple[int, int, int]
NO_STAMP: Stamp = (0, 0, 0)
"""The stamp of no file."""

_ABANDONED_AFTER_S = 60.0

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
    errno.EISDIR: "what is in its place is not a plain file; remove it",
    errno.ELOOP: "a link in its place leads to itself; remove the link",
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
    temporary: Path | None = None,
) -> None:
    """Replace `path` by `content`.

    The temporary file lies in the same directory: a rename works only within one file system, and a watcher of the
    directory sees it. `temporary` is its path where only one process ever writes; otherwise the name is unique.
    `whole` syncs the content before the rename; without it a power cut may leave an empty file under the name.
    `durable` also syncs the directory; without it a power cut may bring the old content back. Raises: StateError.
    """
    name = temporary or path.parent / f".{path.name}.{os.getpid()}-{next(_numbers)}{TEMPORARY_SUFFIX}"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        raise state_error("write", path, error) from error
    try:
        try:
            _write_all(descriptor, content)
            os.fchmod(descriptor, mode)
            if durable or whole:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            name.replace(path)
        except IsADirectoryError:
            if not set_directory_aside(path):
                raise
            name.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            Path(name).unlink()
        raise state_error("write", path, error) from error


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


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
    try:
        sync_directory(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise state_error("sync", directory, error) from error


def clear_abandoned(directory: Path, prefix: str = "") -> None:
    """Remove the temporary files that a killed writer left in the directory. Only names that begin with `prefix` count.

    A file that cannot be removed stays; it does no harm. Raises: StateError if the directory cannot be listed.
    """
    try:
        found = list(directory.glob(f"{prefix}*{TEMPORARY_SUFFIX}"))
    except OSError as error:
        raise state_error("clear up", directory, error) from error
    for path in found:
        # The other instance of a rolling update removed it, somebody else owns it, or the disk is read-only.
        with suppress(OSError):
            if is_abandoned(path):
                path.unlink()


def is_abandoned(path: Path) -> bool:
    """Whether a temporary file, link or empty directory is so old that its writer must be dead. Raises: OSError."""
    return path.lstat().st_mtime < time.time() - _ABANDONED_AFTER_S


def stamp_of(status: os.stat_result) -> Stamp:
    """What differs when a file was written anew: inode, size, change time."""
    return (status.st_ino, status.st_size, status.st_ctime_ns)


def stamp_at(path: Path, look: Callable[[], os.stat_result] | None = None) -> Stamp:
    """The stamp of the plain file at the path, links followed.

    Where something else lies there, such as a directory or a link to one, the stamp is that of the entry itself,
    because others may change a link's target all the time. NO_STAMP if the disk does not answer. `look` returns the
    status of the path. Raises: OSError, except those in UNREADABLE; FileNotFoundError also for a link to nothing.
    """
    try:
        status = look() if look is not None else path.stat()
        if not stat.S_ISREG(status.st_mode):
            status = path.lstat()
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
    else:
        return stamp_of(status)
    try:
        return stamp_of(path.lstat())
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
    return NO_STAMP


def set_aside(path: Path, what: str, stamp: Stamp | None) -> Path | None:
    """Rename an unreadable file, so that a person can look at it; returns the new path.

    None if the file is no longer the one of `stamp`: somebody wrote it anew or renamed it first. Raises: StateError
    that names `what`, also for NO_STAMP, since that may be any file.
    """
    aside = _name_aside(path)
    try:
        if stamp == NO_STAMP:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if stamp_at(path) != stamp:
            return None
        path.rename(aside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise state_error(f"set aside the unreadable {what}", path, error) from error
    return aside


def read_plain(path: Path) -> bytes:
    """The content of a plain file.

    Raises: OSError; EISDIR for everything that is not a plain file, because reading a pipe would never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is not a plain file")
    return path.read_bytes()


def read_or_none(path: Path) -> bytes | None:
    """The content of a plain file; None if there is none, or if no later try could read it. Raises: StateError."""
    try:
        return read_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise state_error("read", path, error) from error


def remove_file(path: Path) -> bool:
    """Remove a file, or rename the directory in its place; returns whether anything was there. Raises: StateError."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if not isinstance(error, IsADirectoryError) or not set_directory_aside(path):
            raise state_error("remove", path, error) from error
    return True


def set_directory_aside(path: Path) -> bool:
    """Rename a directory that lies in the place of a file; returns whether that was done.

    A file stays: the other instance of a rolling update may have written it meanwhile.
    """
    aside = _name_aside(path)
    try:
        # With the slash nothing but a directory is renamed.
        os.rename(f"{path}/", aside)  # noqa: PTH104
    except OSError:
        return False
    _tell_aside(path, aside)
    return True


def set_link_aside(path: Path) -> bool:
    """As `set_directory_aside`, for a link. A lock on the directory lets both instances look and rename in turn."""
    aside = _name_aside(path)
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            if not path.is_symlink():
                return False
            path.rename(aside)
        finally:
            os.close(directory)
    except OSError:
        return False
    _tell_aside(path, aside)
    return True


def _tell_aside(path: Path, aside: Path) -> None:
    _log.warning(
        "stray_set_aside",
        path=str(path),
        kept_as=str(aside),
        remedy="the driver did not make it, and has a file of its own there now; look at it, then remove it",
    )


def _name_aside(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix(QUARANTINE)}{QUARANTINE}-{time.time_ns()}")
