"""Which files of a directory have changed since the last look, from the kernel's file events.

A listing of a thousand files with the status of each costs milliseconds, and a Prepare needs several. The kernel queues
an event before the call that changes a file returns, in whatever process, so a look misses nothing. Where events cannot
be had, every look says that anything may have changed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import weakref
from contextlib import suppress
from pathlib import Path

_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_READ_BYTES = 65536
_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = (
    0x2,
    0x4,
    0x8,
    0x40,
    0x80,
    0x100,
    0x200,
)
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_WATCHED = (
    _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
)
_LOST = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _OVERFLOW | _IGNORED
_ONLYDIR = 0x1000000

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Looks at one directory. For many threads; a change is told to the first of them that looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        self._close: weakref.finalize[..., DirectoryWatch] | None = None
        self._watched: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def changed(self) -> set[str] | None:
        """Names of the files that came, went or changed since the last call; None if that may be any. Raises: OSError
        if there is no such directory."""
        with self._lock:
            status = self._directory.stat()
            identity = (status.st_dev, status.st_ino)
            if self._descriptor is not None and self._watched == identity:
                names = self._names(self._descriptor)
                if names is not None:
                    return names
            self._watch(identity)
            return None

    def _watch(self, identity: tuple[int, int]) -> None:
        """Begin anew: what happens from now on is seen."""
        if self._close is not None:
            self._close()
        self._descriptor = self._close = self._watched = None
        descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            return  # too many watches on this machine
        path = os.fsencode(self._directory)
        if _libc.inotify_add_watch(descriptor, path, _WATCHED | _ONLYDIR) < 0:
            os.close(descriptor)
            return
        self._descriptor, self._watched = descriptor, identity
        self._close = weakref.finalize(self, os.close, descriptor)

    def _names(self, descriptor: int) -> set[str] | None:
        """The names in the events that are queued; None if some are lost."""
        names: set[str] = set()
        while True:
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                return names
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                return None
            at = 0
            while at < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                if mask & _LOST:
                    return None
                with suppress(UnicodeDecodeError):
                    names.add(data[at : at + length].rstrip(b"\0").decode())
                at += length
