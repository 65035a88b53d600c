"""One process works on a node. A newer process takes the work over, as in a rolling update.

    standby ──no other process works, none newer asks──▶ works ──a newer one asks──▶ hands over ──▶ handed over
       └─ the kubelet has registered it: it asks                                                        │
    a new start ◀──no newer process is left─────────────────────────────────────────────────────────────┘

A registered standby process gets all new calls; they wait. Calls that outlast the hand-over fail when they next use a
record.

Each process has a number: its start time, then its PID. It locks two bytes of one file: one says that the process
asks for the work (until it exits), the other that it works. The kernel releases them at a crash. A killed process
whose thread hangs in the kernel keeps its locks, but does not count; other PID namespaces hide that.

| A crash … | leaves | next |
|---|---|---|
| of the worker | no lock | the newest standby process works, or the next start |
| of a process that asks, before it works | a worker that hands over or has handed over | that one starts again |
| of a process that asks, when it works | as above | as above, with the records on disk |
| of an older pod's process, which starts again as the newest | one that was never ready | after a minute that one too |
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from dra_driver.base.atomic import open_plain, state_error
from dra_driver.base.file_lock import LOCK_LAYOUT, byte_lock
from dra_driver.errors import FatalError, StateError
from dra_driver.host.processes import sees_all_processes, start_time
from dra_driver.kubelet.sockets import ensure_plugin_dir
from dra_driver.reporting.node_problems import WORKER_LOCK

_PID_BITS = 22
"""Linux has no larger PIDs."""
_FIRST, _LAST = 4, 2**62
"""Byte 0 is `WORKER_LOCK`'s own."""


class WorkerLock:
    """The right to work on a node. Thread-safe.

    Every method but `close` raises StateError, and FatalError if the lock file was removed.
    """

    def __init__(self, directory: Path, proc: str = "/proc") -> None:
        self._path, self._proc = directory / WORKER_LOCK, proc
        self._sees_all = sees_all_processes(proc)
        pid = os.getpid()
        self._number = ((start_time(proc, pid) or 0) << _PID_BITS | pid) << 1 | self._sees_all
        self._descriptor: int | None = None
        self._guard = threading.Lock()

    def ask(self) -> None:
        """Ask for the work until `close`."""
        with self._guard:
            self._lock(self._number * 2)

    def take(self) -> bool:
        """Work from now on, if no other process does and no newer one asks; return whether."""
        with self._guard:
            if any(offset % 2 or offset > self._number * 2 for offset in self._others(_FIRST)):
                return False
            # Of two processes that do this at the same time, at least one sees the other's lock.
            self._lock(self._number * 2 + 1)
            if not any(offset % 2 for offset in self._others(_FIRST)):
                return True
            self._lock(self._number * 2 + 1, fcntl.F_UNLCK)
            return False

    def is_asked(self) -> bool:
        with self._guard:
            return any(not offset % 2 for offset in self._others(self._number * 2 + 2))

    def close(self) -> None:
        """Stop working and asking: the caller changes nothing on the node any more. Safe to call twice."""
        with self._guard:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _file(self) -> int:
        if self._descriptor is None:
            ensure_plugin_dir(self._path.parent)
            try:
                self._descriptor = open_plain(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise state_error("open the lock file", self._path, error) from error
        if os.fstat(self._descriptor).st_nlink == 0:
            # A newer process would lock another file, and two would work.
            raise FatalError(
                f"{self._path} was removed, so this process can no longer lock it, and starts again"
            )
        return self._descriptor

    def _lock(self, offset: int, kind: int = fcntl.F_WRLCK) -> None:
        try:
            fcntl.fcntl(self._file(), fcntl.F_OFD_SETLK, byte_lock(offset, kind))
        except OSError as error:
            raise state_error("lock", self._path, error) from error

    def _others(self, first: int) -> list[int]:
        return [offset for offset in self._locked(first, _LAST) if self._lives(offset // 2)]

    def _locked(self, first: int, last: int) -> Iterator[int]:
        if first > last:
            return
        asked = struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, first, last - first + 1, 0)
        try:
            found = fcntl.fcntl(self._file(), fcntl.F_OFD_GETLK, asked)
        except OSError as error:
            raise state_error("read the locks of", self._path, error) from error
        kind, _, begin, length, _ = struct.unpack(LOCK_LAYOUT, found)
        if kind != fcntl.F_UNLCK:
            # The kernel returns any of the locks, and adjacent ones of a process as one.
            begin, end = max(first, begin), min(last, begin + length - 1)
            yield from self._locked(first, begin - 1)
            yield from range(begin, end + 1)
            yield from self._locked(end + 1, last)

    def _lives(self, number: int) -> bool:
        if not (number & 1 and self._sees_all):
            return True
        ticks, pid = number >> 1 + _PID_BITS, number >> 1 & 2**_PID_BITS - 1
        try:
            return start_time(self._proc, pid) == ticks
        except StateError:
            return True
