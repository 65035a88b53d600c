"""One call at a time for each claim, and a memory of what was prepared and unprepared a moment ago.

The kubelet cancels a Prepare when the pod goes away and then calls Unprepare, while the handler of the Prepare
runs on; after a kubelet restart or during a rolling update the two may even reach different instances. The
Prepare must not then write a record that nobody will ever take back. Nor must a claim be taken back for what the API
server said of it before it was prepared.

The memory is in the lock files, so that both instances of a rolling update share it; an entry is forgotten after ten
minutes, with a reboot, or when many newer ones came.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dra_driver.state.filelock import hold_file
from dra_driver.state.files import make_directory, state_error

_FILES = 64
"""Claims share a bounded number of lock files, since a file of its own would have to be removed some time."""
_REMEMBERED = 128
_REMEMBERED_NS = 600 * 10**9
_MOST_BYTES = 64 * 1024
_PREPARED = "prepared:"
"""Begins the entry of a Prepare; that of an Unprepare is the bare UID."""


@dataclass(frozen=True, slots=True)
class ClaimTurn:
    """The right to work on one claim, as long as `ClaimLocks.hold` lasts."""

    uid: str
    path: Path
    descriptor: int

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim ended after `moment_ns` (time.monotonic_ns(), of any process)."""
        return self._happened_since(self.uid, moment_ns)

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded after `moment_ns`."""
        return self._happened_since(_PREPARED + self.uid, moment_ns)

    def note_unprepared(self) -> None:
        """Remember that the claim was unprepared now. Raises: StateError."""
        self._note(self.uid)

    def note_prepared(self) -> None:
        """Remember that the claim was prepared now. Raises: StateError."""
        self._note(_PREPARED + self.uid)

    def _happened_since(self, key: str, moment_ns: int) -> bool:
        # What is yet to come was written before a reboot, which starts the clock anew.
        now = time.monotonic_ns()
        return any(noted == key and moment_ns <= at <= now for noted, at in self._remembered())

    def _note(self, key: str) -> None:
        now = time.monotonic_ns()
        kept = [
            (noted, at)
            for noted, at in self._remembered()
            if noted != key and now - _REMEMBERED_NS < at <= now
        ]
        content = json.dumps([*kept[1 - _REMEMBERED :], (key, now)]).encode()
        try:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, content, 0)
        except OSError as error:
            raise state_error("write the lock file", self.path, error) from error

    def _remembered(self) -> list[tuple[str, int]]:
        """What happened to which claim, and when; empty where the file is not readable as that."""
        try:
            entries = json.loads(os.pread(self.descriptor, _MOST_BYTES, 0) or b"[]")
            # A newer release may note more of each.
            return [(str(entry[0]), int(entry[1])) for entry in entries]
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return []


class ClaimLocks:
    """Locks on claims by UID; always taken before those of GPUs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks = [threading.Lock() for _ in range(_FILES)]

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(self, uid: str, timeout_s: float) -> Iterator[ClaimTurn]:
        """Hold the claim's lock. Raises: RetryableError if it cannot be had in time; StateError."""
        number = zlib.crc32(uid.encode()) % _FILES
        path = self._directory / f"claims-{number:02}.lock"
        deadline = time.monotonic() + timeout_s
        with hold_file(path, self._locks[number], deadline, f"claim {uid}") as descriptor:
            yield ClaimTurn(uid, path, descriptor)
