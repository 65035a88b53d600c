"""One call at a time for each claim, and a memory of what was prepared and unprepared a moment ago.

The kubelet cancels a Prepare when the pod goes away and then calls Unprepare, while the handler of the Prepare
runs on; after a kubelet restart or during a rolling update the two may even reach different instances. The
Prepare must not then write a record that nobody will ever take back. Nor must a claim be taken back for what the API
server said of it before it was prepared.

The memory is in the lock files, so that both instances of a rolling update share it; an entry is forgotten after ten
minutes, with a reboot, or when many newer ones came. What a full disk does not take is remembered in this process
until it does, since a claim must be able to go then above all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from dra_driver.state.filelock import byte_lock, hold_file
from dra_driver.state.files import make_directory, state_error

_log = structlog.get_logger(__name__)

_FILES = 64
"""Claims share a bounded number of lock files, since a file of its own would have to be removed some time. Each locks a
byte of its own, so that a call that hangs holds up no other claim; a release before locks the whole file."""
_MEMORY_BYTE = 2**62
"""Beyond those of claims; locked for a moment, while the memory is read or written."""
_REMEMBERED = 128
_REMEMBERED_NS = 600 * 10**9
_MOST_BYTES = 64 * 1024
_PREPARED = "prepared:"
"""Begins the entry of a Prepare; that of an Unprepare is the bare UID."""


@dataclass(slots=True)
class _Shared:
    """A claim's lock among threads, and how many of them want or have it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


@dataclass(frozen=True, slots=True)
class ClaimTurn:
    """The right to work on one claim, as long as `ClaimLocks.hold` lasts."""

    uid: str
    path: Path
    descriptor: int
    unwritten: dict[str, int] = field(default_factory=dict)
    """What the file should hold and does not, in this process; empty where the file holds everything."""

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim ended after `moment_ns` (time.monotonic_ns(), of any process)."""
        return self._happened_since(self.uid, moment_ns)

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded after `moment_ns`, or may have because that is longer ago than is
        remembered."""
        return moment_ns < self._forgotten_before() or self._happened_since(_PREPARED + self.uid, moment_ns)

    def note_unprepared(self) -> None:
        """Remember that the claim was unprepared now."""
        self._note(self.uid)

    def note_prepared(self) -> None:
        """Remember that the claim was prepared now."""
        self._note(_PREPARED + self.uid)

    def _forgotten_before(self) -> int:
        """From when on everything is remembered."""
        now = time.monotonic_ns()
        with self._alone():
            moments = [at for _, at in self._remembered() if at <= now]
        oldest = min(moments) if len(moments) >= _REMEMBERED else 0
        return max(now - _REMEMBERED_NS, oldest)

    def _happened_since(self, key: str, moment_ns: int) -> bool:
        # What is yet to come was written before a reboot, which starts the clock anew.
        now = time.monotonic_ns()
        with self._alone():
            return any(noted == key and moment_ns <= at <= now for noted, at in self._remembered())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other turn reads or writes the memory meanwhile, in any process; nor can anybody have locked the whole
        file, since we have our claim's byte. Raises: StateError."""
        self._lock(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK)
        try:
            yield
        finally:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK)

    def _lock(self, command: int, kind: int) -> None:
        try:
            fcntl.fcntl(self.descriptor, command, byte_lock(_MEMORY_BYTE, kind))
        except OSError as error:
            raise state_error("lock", self.path, error) from error

    def _note(self, key: str) -> None:
        with self._alone():
            self._note_alone(key)

    def _note_alone(self, key: str) -> None:
        now = time.monotonic_ns()
        kept = [
            (noted, at)
            for noted, at in self._remembered()
            if noted != key and now - _REMEMBERED_NS < at <= now
        ]
        entries = [*kept[1 - _REMEMBERED :], (key, now)]
        try:
            self._write(json.dumps(entries).encode())
        except OSError as error:
            if not self.unwritten:
                _log.warning("memory_kept_in_process", reason=str(state_error("write", self.path, error)))
            self.unwritten.clear()
            self.unwritten.update(entries)
        else:
            self.unwritten.clear()

    def _write(self, content: bytes) -> None:
        """In place, with blanks behind it: a full disk takes that, and refuses more before anything is lost."""
        size = os.fstat(self.descriptor).st_size
        if len(content) > size:
            os.posix_fallocate(self.descriptor, 0, len(content))
        os.pwrite(self.descriptor, content.ljust(size), 0)

    def _remembered(self) -> list[tuple[str, int]]:
        """What happened to which claim, and when, oldest first; nothing where the file is not readable as that."""
        try:
            entries = json.loads(os.pread(self.descriptor, _MOST_BYTES, 0).rstrip(b"\0") or b"[]")
            # A newer release may note more of each.
            written = [(str(entry[0]), int(entry[1])) for entry in entries]
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
            written = []
        if not self.unwritten:
            return written
        newest = dict(written)
        for noted, at in self.unwritten.items():
            newest[noted] = max(at, newest.get(noted, at))
        return sorted(newest.items(), key=lambda entry: entry[1])


class ClaimLocks:
    """Locks on claims by UID; always taken before those of GPUs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unwritten: list[dict[str, int]] = [{} for _ in range(_FILES)]
        self._claims: dict[str, _Shared] = {}
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(self, uid: str, timeout_s: float) -> Iterator[ClaimTurn]:
        """Hold the claim's lock. Raises: RetryableError if it cannot be had in time; StateError."""
        number = zlib.crc32(uid.encode()) % _FILES
        path = self._directory / f"claims-{number:02}.lock"
        deadline = time.monotonic() + timeout_s
        with (
            self._among_threads(uid) as lock,
            hold_file(path, lock, deadline, f"claim {uid}", _lock_of(uid)) as descriptor,
        ):
            yield ClaimTurn(uid, path, descriptor, self._unwritten[number])

    @contextmanager
    def _among_threads(self, uid: str) -> Iterator[threading.Lock]:
        with self._guard:
            shared = self._claims.setdefault(uid, _Shared())
            shared.users += 1
        try:
            yield shared.lock
        finally:
            with self._guard:
                shared.users -= 1
                if not shared.users:
                    del self._claims[uid]


def _lock_of(uid: str) -> bytes:
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return byte_lock(int.from_bytes(digest) % _MEMORY_BYTE)
