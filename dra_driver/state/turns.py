"""Whose turn it is to publish, when an old and a new instance of the plugin run side by side.

Each instance that the kubelet has accepted keeps a file with its start in the name, and an
open-file-description lock on it. The kernel gives the lock back however the process ends, so a file that
nobody holds is a dead instance's: after a crash, and after a reboot, which starts the clock of the names anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dra_driver.errors import StateError
from dra_driver.state.filelock import LOCK_LAYOUT, WHOLE_FILE_WRITE_LOCK
from dra_driver.state.files import TEMPORARY_SUFFIX, make_directory, state_error

_FILE = re.compile(r"^(?P<start>\d{20})-(?P<name>[A-Za-z0-9-]+)\.lock\Z", re.ASCII)
_TRIES = 100
# Of a link, of a socket, and of a file that the disk does not give back.
_STRAY = frozenset({errno.ELOOP, errno.ENXIO, errno.EIO})


class Place(NamedTuple):
    """Where an instance stands in the order of starts; the name decides between equal starts."""

    start: int
    name: str

    @property
    def file_name(self) -> str:
        """How the instance's file is called."""
        return f"{self.start:020d}-{self.name}.lock"


class PublishingTurn:
    """This instance's place among those that share `directory`; safe for several threads.

    `name` is the pod's UID where there is one, as two containers may have the same process ID.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self._directory = directory
        # Boot time: one clock for all processes, which neither a person nor NTP sets.
        start = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._place = Place(start, re.sub(r"[^A-Za-z0-9-]", "-", name or str(os.getpid())))
        self._guard = threading.Lock()
        self._registered = False
        self._withdrawn = False
        self._held: int | None = None

    def announce(self) -> None:
        """The kubelet has accepted us: older instances stand by from now on. Harmless twice.

        What fails is tried again with the next `is_ours`.
        Raises: StateError.
        """
        with self._guard:
            if not self._withdrawn:
                self._registered = True
                self._hold_place()

    def is_ours(self) -> bool:
        """Whether no instance that comes before us lives: a newer one, or any while we are not announced.

        Files of dead instances are removed on the way. Raises: StateError.
        """
        with self._guard:
            if self._registered:
                # A full disk keeps us from announcing: then the instance that could goes on alone.
                with suppress(StateError):
                    self._hold_place()
            others = [place for place in self._living() if place != self._place or self._held is None]
            return not any(self._held is None or place > self._place for place in others)

    def withdraw(self) -> None:
        """We publish no more; for good. Harmless twice."""
        with self._guard:
            self._withdrawn, self._registered = True, False
            if self._held is not None:
                with suppress(OSError):
                    self._file().unlink()
                os.close(self._held)
                self._held = None

    def _file(self) -> Path:
        return self._directory / self._place.file_name

    def _hold_place(self) -> None:
        """Have our file in the directory, locked; again if somebody removed it."""
        if self._held is not None:
            if _is_at(self._file(), self._held):
                return
            os.close(self._held)
            self._held = None
        make_directory(self._directory, 0o700)
        for _ in range(_TRIES):
            self._held = self._try_place()
            if self._held is not None:
                return
        raise StateError(f"cannot create {self._file()}: other instances remove it each time; restart them")

    def _try_place(self) -> int | None:
        """The descriptor of our file; None if another try may succeed.

        It is locked under another name and then linked: under its own it is never seen without its lock.
        """
        temporary = self._directory / f".{self._place.file_name}.{os.getpid()}{TEMPORARY_SUFFIX}"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
        except OSError as error:
            raise state_error("create", temporary, error) from error
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE_WRITE_LOCK)
            os.link(temporary, self._file())
        except FileExistsError:
            os.close(descriptor)
            self._place = self._place._replace(start=self._place.start + 1)
            return None
        except (FileNotFoundError, BlockingIOError):  # somebody cleared it before it was locked
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise state_error("announce this instance in", self._directory, error) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        return descriptor

    def _living(self) -> Iterator[Place]:
        try:
            paths = list(self._directory.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise state_error("read", self._directory, error) from error
        for path in paths:
            match = _FILE.match(path.name)
            if match is None and path.suffix != TEMPORARY_SUFFIX:
                continue
            if not _is_locked(path):
                with suppress(OSError):
                    path.unlink()
            elif match is not None:
                yield Place(int(match["start"]), match["name"])


def _is_locked(path: Path) -> bool:
    """Whether a living process holds the file; asked without taking the lock, which others would see.

    Raises: StateError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in _STRAY:
            return False
        raise state_error("open", path, error) from error
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, WHOLE_FILE_WRITE_LOCK)
    except OSError as error:
        raise state_error("ask for the lock of", path, error) from error
    finally:
        os.close(descriptor)
    return bool(struct.unpack(LOCK_LAYOUT, answer)[0] != fcntl.F_UNLCK)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False
