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
"""

from __future__ import annotations

import json
import math
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
from dra_driver.base.file_lock import LockBusyError, hold_file, is_locked
from dra_driver.errors import StateError

_MAX_USE_BYTES = 4096
_REMEMBERED = 1024
"""How many claims are remembered: far more than a node processes during one call."""
_CHECK_S = 0.1
"""How often a waiting call checks whether the kubelet has cancelled it."""


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
    """One lock and one file in `directory` for each GPU UUID."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: dict[str, threading.Lock] = {}

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(
        self,
        gpu_uuids: Iterable[str],
        timeout_s: float,
        uses: Iterable[LockUse] = (),
    ) -> Iterator[Callable[[Iterable[LockUse]], None]]:
        """Hold the locks of all the GPUs. Yields a function that replaces the shown uses. Only the thread that holds
        the locks may call it.

        While the caller waits for one lock it holds none of the others, so a busy GPU does not delay callers
        that need other GPUs. The lock files show `uses` until the block ends, unless the disk is full.

        Programs that the block starts hold the locks too: if this process is killed, the GPUs stay locked until
        the last of these programs has exited. At its end, the block waits for programs that could not be
        killed.

        Raises: LockBusyError if another call keeps a lock for `timeout_s` seconds; StateError.
        """
        wanted = sorted(set(gpu_uuids))
        deadline = time.monotonic() + timeout_s
        awaited = wanted[:1]
        while True:
            with ExitStack() as held:
                descriptors: dict[str, int] = {}
                for uuid in awaited:  # nothing else is held
                    descriptors[uuid] = held.enter_context(self._held(uuid, deadline))
                for uuid in wanted:
                    if uuid in awaited:
                        continue
                    try:
                        descriptors[uuid] = held.enter_context(self._held(uuid, 0.0))
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
                if file.name.endswith(".lock") and file.stat(follow_symlinks=False).st_size
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

    def _held(self, uuid: str, deadline: float) -> AbstractContextManager[int]:
        lock = self._locks.setdefault(uuid, threading.Lock())  # atomic between threads
        busy = f"GPU {uuid} is busy with another operation of gpu-dra-driver; this call will be retried"
        return hold_file(self._file(uuid), lock, deadline, busy)

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}.lock"


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


@contextmanager
def _held(
    lock: threading.Lock, timeout_s: float, busy: str, is_cancelled: Callable[[], bool] | None
) -> Iterator[None]:
    """Raises: LockBusyError with the text `busy` if another thread keeps the lock for `timeout_s` seconds, or
    `is_cancelled` returns True.
    """
    deadline = time.monotonic() + timeout_s
    step = math.inf if is_cancelled is None else _CHECK_S
    while not lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), step))):
        if time.monotonic() >= deadline or (is_cancelled is not None and is_cancelled()):
            raise LockBusyError(busy)
    try:
        yield
    finally:
        lock.release()


class PlanningLock:
    """The lock under which a claim is planned, from reading all records until its own record is written. So two claims
    never get the same device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def hold(
        self, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> AbstractContextManager[None]:
        """Hold the lock.

        Raises: LockBusyError if another call keeps the lock for `timeout_s` seconds, or the kubelet cancels this call
        (`is_cancelled`).
        """
        busy = (
            "the planning of another claim has not finished; the disk may be slow; this call will be retried"
        )
        return _held(self._lock, timeout_s, busy, is_cancelled)


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
    """Locks on claims by UID. A claim's lock is always taken before the planning lock."""

    def __init__(self) -> None:
        self._guards: dict[str, ClaimGuard] = {}  # by claim UID, least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def hold(
        self, uid: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> Iterator[ClaimGuard]:
        """Hold the claim's lock.

        Raises: LockBusyError if another call keeps the lock for `timeout_s` seconds, or the kubelet cancels this call
        (`is_cancelled`).
        """
        with self._lock:
            guard = self._guards[uid] = self._guards.pop(uid) if uid in self._guards else ClaimGuard()
            guard.wanted += 1
            too_many = max(0, len(self._guards) - _REMEMBERED)
            idle = (uid for uid, guard in self._guards.items() if not guard.wanted)
            for oldest in [*islice(idle, too_many)]:
                del self._guards[oldest]
        try:
            busy = f"an earlier call still prepares or unprepares claim {uid}; this call will be retried"
            with _held(guard.lock, timeout_s, busy, is_cancelled):
                yield guard
        finally:
            with self._lock:
                guard.wanted -= 1
