"""Which files of a directory have changed since the last look, from the kernel's file events.

A listing of a thousand files with the status of each costs milliseconds, and a Prepare needs several. The kernel queues
an event before the call that changes a file returns, in whatever process, so a look misses nothing. Where events cannot
be had, every look says that anything may have changed.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
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
_LOST = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED
_ONLYDIR = 0x1000000

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Looks at one directory. For many threads; a change is told to the first of them that looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._identity: tuple[int, int] | None = None
        self._names: set[str] | None = None
        self._must_list = True

    def look(self) -> tuple[set[str], bool]:
        """Names of the files to look at: those that have changed since the last call, or all that are there, which the
        second value says. Raises: OSError; then the next call answers all."""
        changed = self.changed()
        if changed is not None and not self._must_list:
            return changed, False
        self._must_list = True  # until the listing succeeds: no event tells of files that were there before
        names = set(os.listdir(self._directory))  # noqa: PTH208  a thousand Path objects cost milliseconds
        self._must_list = False
        return names, True

    def changed(self) -> set[str] | None:
        """Names of the files that came, went or changed since the last call; None if that may be any. Raises: OSError
        if there is no such directory."""
        status = self._directory.stat()
        identity = (status.st_dev, status.st_ino)
        with _events.lock:
            _events.read()
            names = self._names
            if names is not None and self._identity == identity:
                self._names = set()
                return names
            # What happens from now on is seen; the caller looks at everything after this.
            self._identity, self._names = identity, set() if _events.watch(self._directory, self) else None
            return None

    def note(self, name: str) -> None:
        """An event: the file of this name came, went or changed."""
        if self._names is not None:
            self._names.add(name)

    def lose(self) -> None:
        """Events were lost, or will be: look at everything."""
        self._names = None


class _Events:
    """The kernel's queue of this process: one for all directories, because a machine has few. The caller holds
    `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._descriptor: int | None = None
        self._watches: dict[int, weakref.WeakSet[DirectoryWatch]] = {}  # by the kernel's number

    def watch(self, directory: Path, whom: DirectoryWatch) -> bool:
        """Tell `whom` of the directory's events from now on; whether that can be done."""
        if self._descriptor is None:
            descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if descriptor < 0:
                return False  # too many queues on this machine
            self._descriptor = descriptor
        for number, watching in list(self._watches.items()):
            watching.discard(whom)
            if not watching:
                del self._watches[number]
                _libc.inotify_rm_watch(self._descriptor, number)
        number = _libc.inotify_add_watch(self._descriptor, os.fsencode(directory), _WATCHED | _ONLYDIR)
        if number < 0:
            return False
        self._watches.setdefault(number, weakref.WeakSet()).add(whom)
        return True

    def read(self) -> None:
        """Pass all events on that are queued."""
        while self._descriptor is not None:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                self._pass_on(number, mask, data[at : at + length].rstrip(b"\0"))
                at += length

    def forget(self) -> None:
        """In a process that was forked: the queue is its parent's."""
        self.lock = threading.Lock()
        self._descriptor = None
        for watching in self._watches.values():
            for whom in watching:
                whom.lose()
        self._watches = {}

    def _pass_on(self, number: int, mask: int, name: bytes) -> None:
        if mask & _OVERFLOW:
            for watching in self._watches.values():
                for whom in watching:
                    whom.lose()
        for whom in self._watches.get(number, ()):
            if mask & _LOST:
                whom.lose()
            else:
                whom.note(os.fsdecode(name))
        if mask & _IGNORED:
            self._watches.pop(number, None)


_events = _Events()
os.register_at_fork(after_in_child=_events.forget)
