"""Decides which instance publishes and reports for the node while an old and a new instance run side by side: the
newest.

Each instance that the kubelet has accepted keeps a file with its start time in the name, and holds an
open-file-description lock on it. The kernel releases the lock when the process ends, even after a crash. So an unlocked
file belongs to a dead instance: after a crash, or after a reboot, which resets the clock in the names.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.base.atomic import TEMPORARY_SUFFIX, make_directory, state_error
from dra_driver.base.file_lock import WHOLE_FILE_WRITE_LOCK, is_locked
from dra_driver.errors import StateError

_log = structlog.get_logger(__name__)

DIRECTORY = "publishers"
"""A subdirectory of the plugin's own directory."""
_FILE = re.compile(r"\d{20}-([A-Za-z0-9-]+)\.lock", re.ASCII)
"""The start time, so that names sort by start; the rest of the name decides between equal times."""
_TRIES = 100


class InstanceLeadership:
    """Decides whether this instance leads the instances that share `directory`. Thread-safe.

    `name` is the pod's UID if there is one, because two containers may have the same process ID.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self._directory = directory
        # Time since boot: all processes share this clock, and neither people nor NTP can set it.
        start = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        called = re.sub(r"[^A-Za-z0-9-]", "-", name or str(os.getpid()))
        self._file = directory / f"{start:020d}-{called}.lock"
        self._guard = threading.Lock()
        self._registered = False
        self._withdrawn = False
        self._held: int | None = None
        self._unreadable: set[str] = set()  # the names that were logged

    def announce(self) -> None:
        """Call this when the kubelet has accepted this instance, so that older instances stand by. Safe to call twice.

        After a failure, the next `is_ours` retries. Raises: StateError.
        """
        with self._guard:
            if not self._withdrawn:
                self._registered = True
                self._hold_file()

    def is_ours(self) -> bool:
        """Whether this instance leads: no newer instance is alive, and if this one is not announced, no other
        instance at all.

        Removes the files of dead instances. Raises: StateError.
        """
        with self._guard:
            if self._registered:
                # On a full disk this instance cannot announce itself; the older instance then continues to lead.
                with suppress(StateError):
                    self._hold_file()
            return not any(self._held is None or other > self._file.name for other in self._living())

    def speaks_for_node(self) -> bool:
        """Like `is_ours`; True if unknown, because two reporting instances are better than none."""
        try:
            return self.is_ours()
        except StateError as error:
            _log.debug("turn_unknown", reason=str(error))
            return True

    def withdraw(self) -> None:
        """Gives up leading for good. Safe to call twice."""
        with self._guard:
            self._withdrawn, self._registered = True, False
            if self._held is not None:
                with suppress(OSError):
                    self._file.unlink()
                os.close(self._held)
                self._held = None

    def _hold_file(self) -> None:
        """Creates and locks our file in the directory; recreates the file if someone removed it."""
        if self._held is not None:
            if _is_at(self._file, self._held):
                return
            os.close(self._held)
            self._held = None
        make_directory(self._directory, 0o700)
        for _ in range(_TRIES):
            self._held = self._try_file()
            if self._held is not None:
                return
        raise StateError(f"cannot create {self._file}: other instances remove it each time; restart them")

    def _try_file(self) -> int | None:
        """Returns the descriptor of our file; None if another attempt may succeed.

        The file is locked under a temporary name and then linked, so it is never visible without its lock.
        """
        temporary = self._directory / f".{self._file.name}.{os.getpid()}{TEMPORARY_SUFFIX}"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
        except OSError as error:
            raise state_error("create", temporary, error) from error
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE_WRITE_LOCK)
            os.link(temporary, self._file)
        except (FileNotFoundError, BlockingIOError):  # someone removed the file before it was locked
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise state_error("announce this instance in", self._directory, error) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        return descriptor

    def _living(self) -> Iterator[str]:
        """Yields the file names of living instances. Raises: StateError."""
        try:
            names = os.listdir(self._directory)  # noqa: PTH208  runs every second: avoid Path objects
        except FileNotFoundError:
            return
        except OSError as error:
            raise state_error("read", self._directory, error) from error
        for name in names:
            is_ours = self._held is not None and name == self._file.name
            is_instance = _FILE.fullmatch(name) is not None
            if not is_instance and not name.endswith(TEMPORARY_SUFFIX):
                continue
            if not is_ours and not self._is_locked(name):
                with suppress(OSError):
                    (self._directory / name).unlink()
            elif is_instance:
                yield name

    def _is_locked(self, name: str) -> bool:
        """Whether a living instance holds the file. A file on a bad block counts as one of a dead instance, so that it
        is removed: a living instance makes its own file again. Raises: StateError.
        """
        try:
            return is_locked(self._directory / name)
        except StateError as error:
            if getattr(error.__cause__, "errno", None) != errno.EIO:
                raise
            if name not in self._unreadable:
                self._unreadable.add(name)
                _log.warning("instance_file_unreadable", reason=str(error))
            return False


def live_instances(directory: Path) -> frozenset[str]:
    """Returns the names of the instances that hold a file in the directory, such as pod UIDs. Raises:
    StateError.
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208  as above
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise state_error("read", directory, error) from error
    found = (_FILE.fullmatch(name) for name in names)
    return frozenset(one[1] for one in found if one is not None and is_locked(directory / one[0]))


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still refers to the open file."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False
