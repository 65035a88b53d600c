"""Locks on physical GPUs and on claims, among the threads of this process and against a second instance of the plugin.

While the lock of a GPU is held, its file says for what: the other instance of a rolling update reads it. The programs
that an operation starts hold the lock too, such as nvidia-smi or a write to the kernel: if the plugin is killed, the
file tells its successor what is still at work on the GPU. What else a crash leaves in the file counts for nothing,
because no process holds the lock.

The lock of a claim lets one call at a time work on the claim, and remembers which claims were prepared and unprepared a
moment ago. When a pod goes away, the kubelet cancels its Prepare and then calls Unprepare, while the handler of the
Prepare still runs. After a kubelet restart or during a rolling update the two calls may even reach different instances.
Such a late Prepare must not write a record that no Unprepare would ever remove. And no claim may be released because of
an answer of the API server that is older than its Prepare.

Each entry of this memory has the time of the event and the time at which the kubelet's call for it began, because a
newer call may overtake an older one. An older Unprepare must leave what a newer call prepared; a Prepare goes on after
an older Unprepare.

The memory is in the lock files, so both instances of a rolling update share it. An entry is forgotten after ten
minutes, at a reboot, or when many newer entries come. While the disk is full, this process keeps the entries in memory,
because claims must be able to go especially then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from dra_driver.concurrency.bounded_program import inherited
from dra_driver.errors import StateError
from dra_driver.files.atomic import make_directory, open_plain, state_error
from dra_driver.files.file_lock import LockBusyError, byte_lock, hold_file, is_locked

_log = structlog.get_logger(__name__)

_MOST_USE_BYTES = 4096
_FILES = 64
"""Claims share a fixed number of lock files: a file for each claim would have to be removed at some time. Each claim
locks its own byte, so a call that hangs delays no other claim."""
_OF_CLAIMS = "claims-"
"""How the names of these files begin."""
_MEMORY_BYTE = 2**62
"""After the bytes of the claims. It is locked for a moment, while the memory is read or written."""
_REMEMBERED = 128
_REMEMBERED_NS = 600 * 10**9
_MOST_BYTES = 64 * 1024
_PREPARED = "prepared:"
"""Prefix of the key of a Prepare; the key of an Unprepare is the UID alone."""


@dataclass(frozen=True, slots=True)
class LockUse:
    """What the lock of a GPU is held for. `began` is a time of time.monotonic(), which all processes of a boot share;
    `since` says the same for people. `only_writes`: it waits for a write to the kernel, and needs no NVML."""

    gpu_uuid: str
    what: str
    began: float
    since: str
    only_writes: bool = False


class GpuLocks:
    """One lock and one file in `directory` for each GPU UUID, for one purpose: another `suffix` is another lock."""

    def __init__(self, directory: Path, suffix: str = ".lock") -> None:
        self._directory = directory
        self._suffix = suffix
        self._locks: dict[str, threading.Lock] = {}

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(
        self,
        gpu_uuids: Iterable[str],
        timeout_s: float,
        has_left: Callable[[], bool] | None = None,
        uses: Iterable[LockUse] = (),
    ) -> Iterator[Callable[[Iterable[LockUse]], None]]:
        """Hold the locks of all the GPUs. While the caller waits for one of them, it holds none of the others, so a GPU
        that is busy delays nobody who wants other GPUs. The lock files show `uses` until the block ends, unless the
        disk is full. It yields a function that shows other uses, for the thread that holds the locks.

        Programs that the block starts hold the locks too: if this process is killed, the GPUs are locked until the last
        of these programs has ended. At its end the block waits for programs that could not be killed.

        Raises: LockBusyError if another call keeps one of them for `timeout_s` seconds, or until `has_left` says that
        the kubelet cancelled this call; StateError.
        """
        wanted = sorted(set(gpu_uuids))
        deadline = time.monotonic() + timeout_s
        awaited = wanted[:1]
        while True:
            with ExitStack() as held:
                descriptors: dict[str, int] = {}
                for uuid in awaited:  # nothing else is held
                    descriptors[uuid] = held.enter_context(self._held(uuid, deadline, has_left))
                for uuid in wanted:
                    if uuid in awaited:
                        continue
                    try:
                        descriptors[uuid] = held.enter_context(self._held(uuid, 0.0, None))
                    except LockBusyError:
                        awaited = [uuid]
                        break
                else:
                    with _shown(descriptors, uses) as show, inherited(descriptors.values()) as programs:
                        try:
                            yield show
                        finally:
                            for program in programs.left:
                                program.wait()
                    return

    def uses(self) -> list[LockUse]:
        """What the locks that somebody holds now are held for, as far as their files tell."""
        found = []
        with suppress(OSError), os.scandir(self._directory) as files:
            found = [
                Path(file.path)
                for file in files
                if file.name.endswith(self._suffix)
                and not file.name.startswith(_OF_CLAIMS)
                and file.stat(follow_symlinks=False).st_size
            ]
        return [use for path in sorted(found) if (use := self._use(path)) is not None]

    def _use(self, path: Path) -> LockUse | None:
        try:
            descriptor = open_plain(path, os.O_RDONLY)
            try:
                entry = json.loads(os.pread(descriptor, _MOST_USE_BYTES, 0))
            finally:
                os.close(descriptor)
            use = LockUse(
                str(entry["gpu_uuid"]),
                str(entry["what"]),
                float(entry["began"]),
                str(entry["since"]),
                entry["only_writes"] is True,
            )
            return use if path == self._file(use.gpu_uuid) and is_locked(path) else None
        except (OSError, StateError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return None

    def _held(
        self, uuid: str, deadline: float, has_left: Callable[[], bool] | None
    ) -> AbstractContextManager[int]:
        lock = self._locks.setdefault(uuid, threading.Lock())  # in one go, also among threads
        return hold_file(self._file(uuid), lock, deadline, f"GPU {uuid}", has_left=has_left)

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}{self._suffix}"


@contextmanager
def _shown(
    descriptors: Mapping[str, int], uses: Iterable[LockUse]
) -> Iterator[Callable[[Iterable[LockUse]], None]]:
    """Write `uses` into the lock files until the block ends. Yields a function that writes other uses instead."""
    shown: set[str] = set()

    def show(uses: Iterable[LockUse]) -> None:
        for use in uses:
            shown.add(use.gpu_uuid)
            _write(descriptors[use.gpu_uuid], json.dumps(asdict(use)).encode())

    def clear() -> None:
        for uuid in shown:
            _write(descriptors[uuid], b"")

    show(uses)
    try:
        yield show
    except Exception:
        clear()
        raise
    clear()


def _write(descriptor: int, content: bytes) -> None:
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)


class _Entry(NamedTuple):
    """One event. `key` is the claim's UID for an Unprepare, and `_PREPARED` and the UID for a Prepare.

    `at` is the time of the event, `began` the time at which the kubelet's call for it began (equal to `at` if only that
    is known); both are time.monotonic_ns().
    """

    key: str
    at: int
    began: int


@dataclass(frozen=True, slots=True)
class ClaimGuard:
    """The right to work on one claim, inside `ClaimLocks.hold`."""

    uid: str
    path: Path
    descriptor: int
    unwritten: dict[str, _Entry] = field(default_factory=dict)
    """Entries of this process that could not be written to the file; empty if the file has everything."""

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim has ended whose call began after `moment_ns` (time.monotonic_ns(), of any
        process)."""
        return any(moment_ns <= entry.began for entry in self._noted(self.uid))

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded after `moment_ns`. Also true if `moment_ns` is further back than the
        memory, since nobody knows then."""
        return moment_ns < self._forgotten_before() or any(
            moment_ns <= entry.at for entry in self._noted(_PREPARED + self.uid)
        )

    def was_prepared_by_call_after(self, moment_ns: int) -> bool:
        """Whether a call that began after `moment_ns` prepared the claim, or may have: that is not known
        of a time before the memory."""
        return moment_ns < self._forgotten_before() or any(
            moment_ns < entry.began for entry in self._noted(_PREPARED + self.uid)
        )

    def note_unprepared(self, began_ns: int | None = None) -> None:
        """Remember that the claim was unprepared now, by a call that began at `began_ns`."""
        self._note(self.uid, began_ns)

    def note_prepared(self, began_ns: int | None = None) -> None:
        """Remember that the claim was prepared now, by a call that began at `began_ns`."""
        self._note(_PREPARED + self.uid, began_ns)

    def _forgotten_before(self) -> int:
        """The time (time.monotonic_ns()) after which no entry is forgotten."""
        now = time.monotonic_ns()
        with self._alone():
            moments = [entry.at for entry in self._remembered() if entry.at <= now]
        oldest = min(moments) if len(moments) >= _REMEMBERED else 0
        return max(now - _REMEMBERED_NS, oldest)

    def _noted(self, key: str) -> list[_Entry]:
        # An entry of the future was written before a reboot, at which the clock starts again.
        now = time.monotonic_ns()
        with self._alone():
            return [entry for entry in self._remembered() if entry.key == key and entry.at <= now]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Meanwhile no other guard reads or writes the memory, in any process. Raises: StateError."""
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

    def _note(self, key: str, began_ns: int | None) -> None:
        with self._alone():
            now = time.monotonic_ns()
            kept = [
                entry
                for entry in self._remembered()
                if entry.key != key and now - _REMEMBERED_NS < entry.at <= now
            ]
            entries = [*kept[1 - _REMEMBERED :], _Entry(key, now, now if began_ns is None else began_ns)]
            try:
                self._write(json.dumps(entries).encode())
            except OSError as error:
                if not self.unwritten:
                    _log.warning("memory_kept_in_process", reason=str(state_error("write", self.path, error)))
                self.unwritten.clear()
                self.unwritten.update({entry.key: entry for entry in entries})
            else:
                self.unwritten.clear()

    def _write(self, content: bytes) -> None:
        """Write in place, padded with blanks: that works on a full disk. If the file has to grow, a full disk refuses
        before anything is lost."""
        size = os.fstat(self.descriptor).st_size
        if len(content) > size:
            os.posix_fallocate(self.descriptor, 0, len(content))
        os.pwrite(self.descriptor, content.ljust(size), 0)

    def _remembered(self) -> list[_Entry]:
        """The entries, oldest first; none if the file has no valid content."""
        try:
            entries = json.loads(os.pread(self.descriptor, _MOST_BYTES, 0).rstrip(b"\0") or b"[]")
            written = [_Entry(str(key), int(at), int(began)) for key, at, began in entries]
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
            written = []
        if not self.unwritten:
            return written
        newest = {entry.key: entry for entry in written}
        for entry in self.unwritten.values():
            newest[entry.key] = max(entry, newest.get(entry.key, entry))
        return sorted(newest.values(), key=lambda entry: entry.at)


class ClaimLocks:
    """Locks on claims by UID. A claim's lock is always taken before the locks of GPUs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unwritten: list[dict[str, _Entry]] = [{} for _ in range(_FILES)]
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        """A claim's lock among the threads of this process, as long as one of them wants or holds it."""
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory and the lock files: a full disk must not keep a claim from being unprepared for want of
        one. Raises: StateError if the directory cannot be made."""
        make_directory(self._directory, 0o700)
        for number in range(_FILES):
            with suppress(OSError):  # the caller that needs the file reports what is wrong with it
                os.close(open_plain(self._file(number), os.O_RDWR | os.O_CREAT))

    @contextmanager
    def hold(
        self, uid: str, timeout_s: float, has_left: Callable[[], bool] | None = None
    ) -> Iterator[ClaimGuard]:
        """Hold the claim's lock. Raises: RetryableError if another call keeps it for `timeout_s` seconds, or until
        `has_left` says that the kubelet cancelled this call; StateError."""
        number = zlib.crc32(uid.encode()) % _FILES
        path = self._file(number)
        deadline = time.monotonic() + timeout_s
        with self._guard:
            lock = self._locks.setdefault(uid, threading.Lock())
        with hold_file(path, lock, deadline, f"claim {uid}", _lock_of(uid), has_left) as descriptor:
            yield ClaimGuard(uid, path, descriptor, self._unwritten[number])

    def _file(self, number: int) -> Path:
        return self._directory / f"{_OF_CLAIMS}{number:02}.lock"


def _lock_of(uid: str) -> bytes:
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return byte_lock(int.from_bytes(digest) % _MEMORY_BYTE)
