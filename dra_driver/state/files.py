"""Writing a file so that a reader, a crash or a power cut sees the old content or the new, never a part."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.errors import StateError

_log = structlog.get_logger(__name__)

TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = ".unreadable"
# Errors of what no later try would read either; others, such as too many open files, pass.
UNREADABLE = frozenset({errno.EIO, errno.EISDIR})

Stamp = tuple[int, int, int]

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
    errno.EISDIR: "what is in its place is no plain file; remove it",
    errno.ENOTDIR: "a part of the path is no directory; remove what is in its place",
}


def state_error(action: str, path: Path, error: OSError) -> StateError:
    """One sentence for a failed file operation: what, where, and what to do about it."""
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    return StateError(f"cannot {action} {path}: {remedy}")


def write_atomically(
    path: Path, content: bytes, *, mode: int = 0o600, durable: bool = True, whole: bool = True
) -> None:
    """Replace `path` by `content`.

    The temporary file lies in the same directory, because a rename from elsewhere is no rename, and because
    a watcher of the directory sees it. `whole` has the content on disk before it gets the name, or a power cut could
    leave the name with an empty file. `durable` also syncs the directory; else a power cut may bring the old content
    back. Raises: StateError.
    """
    name = path.parent / f".{path.name}.{os.getpid()}-{next(_numbers)}{TEMPORARY_SUFFIX}"
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
    """Create the directory and its parents where missing, whatever the umask would allow.

    Parents can be looked into by root's group as well, as the kubelet's own. `durable` has it survive a power cut,
    without which no file in it does. Raises: StateError.
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
    """Have what was removed from the directory stay removed after a power cut. Raises: StateError."""
    try:
        sync_directory(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise state_error("sync", directory, error) from error


def clear_abandoned(directory: Path, prefix: str = "") -> None:
    """Remove the temporary files that a killed writer left in the directory, of those whose names begin with `prefix`.

    Raises: StateError.
    """
    try:
        for path in directory.glob(f"{prefix}*{TEMPORARY_SUFFIX}"):
            # The other instance of a rolling update is at work, or it is no file of ours.
            with suppress(FileNotFoundError, IsADirectoryError):
                if is_abandoned(path):
                    path.unlink()
    except OSError as error:
        raise state_error("clear up", directory, error) from error


def is_abandoned(path: Path) -> bool:
    """Whether a temporary file or an empty directory is so old that whoever made it is dead. Raises: OSError."""
    return path.stat().st_mtime < time.time() - _ABANDONED_AFTER_S


def stamp_of(status: os.stat_result) -> Stamp:
    """What differs when a file was written anew: inode, size, change time."""
    return (status.st_ino, status.st_size, status.st_ctime_ns)


def set_aside(path: Path, what: str, stamp: Stamp | None) -> Path | None:
    """Keep an unreadable file for a person to look at, under another name: which; None if it is not the file of
    `stamp` any more, because somebody wrote it anew or was quicker.

    Raises: StateError that names `what`.
    """
    aside = _name_aside(path)
    try:
        if stamp_of(path.stat()) != stamp:
            return None
        path.rename(aside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise state_error(f"set aside the unreadable {what}", path, error) from error
    return aside


def read_plain(path: Path) -> bytes:
    """What is in a file.

    Raises: OSError; that is EISDIR for whatever is no plain file, as it would last for ever to read a pipe.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is no plain file")
    return path.read_bytes()


def remove_file(path: Path) -> bool:
    """Remove a file, or set aside the directory in its place; whether anything was there. Raises: OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        if not set_directory_aside(path):
            raise
    return True


def set_directory_aside(path: Path) -> bool:
    """Give a directory that is in the place of a file another name; whether that was done. A file stays, which the
    other instance of a rolling update may have put there meanwhile."""
    aside = _name_aside(path)
    try:
        # With the slash nothing but a directory is renamed.
        os.rename(f"{path}/", aside)  # noqa: PTH104
    except OSError:
        return False
    _log.warning(
        "stray_set_aside",
        path=str(path),
        kept_as=str(aside),
        remedy="the driver did not make it, and has a file of its own there now; look at it, then remove it",
    )
    return True


def _name_aside(path: Path) -> Path:
    return path.with_name(f"{path.name}{QUARANTINE}-{time.time_ns()}")
