"""Locks on GPUs and on claims. They exclude other threads and the second instance of a rolling update.

While the lock of a GPU is held, its file names the operation and its start, for the other instance. The
programs that an operation starts, such as nvidia-smi or a helper that writes to the kernel, hold the lock too: if the
plugin is killed, its successor can see what still runs on the GPU. If no process holds the lock, the content of the
file is ignored.

The lock of a claim lets one call at a time work on the claim. It remembers, in this process, the last calls
that prepared and unprepared the claim. When a pod is deleted, the kubelet cancels its Prepare and calls
Unprepare while the handler of the Prepare still runs. Such a late Prepare must not write a record that no
Unprepare would ever remove. An Unprepare that a newer Prepare has overtaken must keep what that Prepare did.
The reconciler must not unprepare a claim because of an answer from the API server that is older than the claim's
Prepare.

The two instances of a rolling update share the locks, but not this memory. Across instances, the plugin relies on the
kubelet, which cancels a call before it sends a newer one, and on the records. `Executor.finish` fails if another call
has changed the record, and the reconciler removes a record that is written after that (`claims.reconciler`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from dra_driver.base.atomic import make_directory, open_plain
from dra_driver.base.bounded_program import inherited
from dra_driver.base.file_lock import LockBusyError, byte_lock, hold_file, is_locked
from dra_driver.errors import StateError

_MAX_USE_BYTES = 4096
_REMEMBERED = 1024
"""How many claims are remembered: far more than a node processes during one call."""


@dataclass(frozen=True, slots=True)
class LockUse:
    """The operation for which the lock of a GPU is held.

    `began` is a `time.monotonic()` value, which is comparable between processes until the next reboot; `since` is
    the same time as text.
    `only_writes` means that the operation waits for a write to the kernel and does not need NVML.
    """

    gpu_uuid: str
    what: str
    began: float
    since: str
    only_writes: bool = False

    @property
    def text(self) -> str:
        """Describe the operation on the GPU and its start."""
        return f"{self.what} on GPU {self.gpu_uuid} began at {self.since} UTC and has not finished"


class GpuLocks:
    """One lock and one file in `directory` for each GPU UUID. Each `suffix` is a separate set of locks."""

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
        is_cancelled: Callable[[], bool] | None = None,
        uses: Iterable[LockUse] = (),
    ) -> Iterator[Callable[[Iterable[LockUse]], None]]:
        """Hold the locks of all the GPUs. Yields a function that replaces the shown uses. Only the thread that holds
        the locks may call it.

        While the caller waits for one lock it holds none of the others, so a busy GPU does not delay callers
        that need other GPUs. The lock files show `uses` until the block ends, unless the disk is full.

        Programs that the block starts hold the locks too: if this process is killed, the GPUs stay locked until
        the last of these programs has exited. At its end, the block waits for programs that could not be
        killed.

        Raises: LockBusyError if another call keeps a lock for `timeout_s` seconds, or the kubelet cancels this
        call (`is_cancelled`); StateError.
        """
        wanted = sorted(set(gpu_uuids))
        deadline = time.monotonic() + timeout_s
        awaited = wanted[:1]
        while True:
            with ExitStack() as held:
                descriptors: dict[str, int] = {}
                for uuid in awaited:  # nothing else is held
                    descriptors[uuid] = held.enter_context(self._held(uuid, deadline, is_cancelled))
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
        """Return the uses of the locks that are held now, as far as their files can be read."""
        found = []
        with suppress(OSError), os.scandir(self._directory) as files:
            found = [
                Path(file.path)
                for file in files
                if file.name.endswith(self._suffix) and file.stat(follow_symlinks=False).st_size
            ]
        return [use for path in sorted(found) if (use := self._use(path)) is not None]

    def _use(self, path: Path) -> LockUse | None:
        try:
            descriptor = open_plain(path, os.O_RDONLY)
            try:
                entry = json.loads(os.pread(descriptor, _MAX_USE_BYTES, 0))
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
        self, uuid: str, deadline: float, is_cancelled: Callable[[], bool] | None
    ) -> AbstractContextManager[int]:
        lock = self._locks.setdefault(uuid, threading.Lock())  # atomic between threads
        busy = f"GPU {uuid} is busy with another operation of gpu-dra-driver; this call will be retried"
        return hold_file(self._file(uuid), lock, deadline, busy, is_cancelled=is_cancelled)

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


@dataclass(slots=True, eq=False)
class ClaimGuard:
    """The right to work on one claim, inside `ClaimLocks.hold`.

    It remembers the last successful calls for the claim in this process: when the Prepare ended, and when each
    call began (time.monotonic_ns(); -1 for no call). `wanted` counts the calls that hold the right or wait for
    it.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    wanted: int = 0
    prepared_ns: int = -1
    prepare_began_ns: int = -1
    unprepare_began_ns: int = -1

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim that began at `moment_ns` or later has ended in this process."""
        return moment_ns <= self.unprepare_began_ns

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded in this process at `moment_ns` or later."""
        return moment_ns <= self.prepared_ns

    def was_prepared_by_call_after(self, moment_ns: int) -> bool:
        """Whether a call that began after `moment_ns` prepared the claim in this process."""
        return moment_ns < self.prepare_began_ns

    def note_unprepared(self, began_ns: int) -> None:
        """Remember that a call that began at `began_ns` has unprepared the claim."""
        self.unprepare_began_ns = max(self.unprepare_began_ns, began_ns)

    def note_prepared(self, began_ns: int) -> None:
        """Remember that a call that began at `began_ns` has prepared the claim now."""
        self.prepared_ns = time.monotonic_ns()
        self.prepare_began_ns = max(self.prepare_began_ns, began_ns)


class ClaimLocks:
    """Locks on claims by UID. A claim's lock is always taken before the locks of GPUs.

    Each lock is one byte of a permanent file, because a file for each claim would have to be removed later.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "claims.lock"
        self._guards: dict[str, ClaimGuard] = {}  # by claim UID, least recently used first
        self._lock = threading.Lock()

    def open(self) -> None:
        """Create the directory and the file in advance, so that a full disk does not keep a claim from being
        unprepared.

        Raises: StateError if the directory cannot be created.
        """
        make_directory(self._path.parent, 0o700)
        with suppress(OSError):  # the caller that needs the file reports what is wrong with it
            os.close(open_plain(self._path, os.O_RDWR | os.O_CREAT))

    @contextmanager
    def hold(
        self, uid: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> Iterator[ClaimGuard]:
        """Hold the claim's lock.

        Raises: RetryableError if another call keeps the lock for `timeout_s` seconds, or the kubelet cancels this call
        (`is_cancelled`); StateError.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            guard = self._guards[uid] = self._guards.pop(uid) if uid in self._guards else ClaimGuard()
            guard.wanted += 1
            too_many = max(0, len(self._guards) - _REMEMBERED)
            idle = (uid for uid, guard in self._guards.items() if not guard.wanted)
            for oldest in [*islice(idle, too_many)]:
                del self._guards[oldest]
        try:
            busy = f"an earlier call still prepares or unprepares claim {uid}; this call will be retried"
            with hold_file(self._path, guard.lock, deadline, busy, _lock_of(uid), is_cancelled):
                yield guard
        finally:
            with self._lock:
                guard.wanted -= 1


def _lock_of(uid: str) -> bytes:
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return byte_lock(int.from_bytes(digest) % 2**62)
