"""Locks on GPUs, between processes; and locks on claims and on planning, between the threads of this process.

The lanes let one operation at a time work on a GPU. In addition, an operation holds the lock file of its GPU, and so do
the programs that it starts, such as nvidia-smi or a helper that writes to the kernel. So an operation also waits for
the programs that a killed plugin has left, for a hanging thread of a plugin that has handed over its work, and for
`gpu-dra-driver cleanup --now`.

The lock of a claim lets one call at a time work on the claim. It remembers the last calls that prepared and unprepared
the claim. When a pod is deleted, the kubelet cancels its Prepare and calls Unprepare while the handler of the Prepare
still runs. Such a late Prepare must not write a record that no Unprepare would ever remove. An Unprepare that a newer
Prepare has overtaken must keep what that Prepare did. The reconciler must not unprepare a claim because of an answer
from the API server that is older than the claim's Prepare.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from dra_driver.base.atomic import make_directory
from dra_driver.base.bounded_program import inherited
from dra_driver.base.file_lock import LockBusyError, hold_file, is_locked

_REMEMBERED = 1024
"""How many claims are remembered: far more than a node processes during one call."""
_CHECK_S = 0.1
"""How often a waiting call checks whether the kubelet has cancelled it."""


class GpuLocks:
    """One lock for each GPU UUID: a file in `directory`, which is never removed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> Iterator[None]:
        """Hold the locks of all the GPUs.

        Programs that the block starts hold the locks too: if this process is killed, the GPUs stay locked until
        the last of these programs has exited. At its end, the block waits for programs that could not be
        killed.

        Raises: LockBusyError if another process keeps a lock for `timeout_s` seconds; StateError.
        """
        deadline = time.monotonic() + timeout_s
        with ExitStack() as held:
            # Every process takes the locks in the same order, so no two processes wait for each other.
            locks = [held.enter_context(self._held(uuid, deadline)) for uuid in sorted(set(gpu_uuids))]
            with inherited(locks) as programs:
                try:
                    yield
                finally:
                    for program in programs.left:
                        program.wait()

    def is_held(self, gpu_uuid: str) -> bool:
        """Whether a process works on the GPU. Raises: StateError."""
        return is_locked(self._file(gpu_uuid))

    def held(self) -> list[str]:
        """Return the UUIDs of the GPUs on which a process works. Raises: StateError."""
        return [
            uuid for path in sorted(self._directory.glob("GPU-*.lock")) if self.is_held(uuid := path.stem)
        ]

    def _held(self, uuid: str, deadline: float) -> AbstractContextManager[int]:
        busy = f"another process of gpu-dra-driver still works on GPU {uuid}; if this lasts, drain and reboot the node"
        return hold_file(self._file(uuid), threading.Lock(), deadline, busy)

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}.lock"


@contextmanager
def _in_time(
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
        return _in_time(self._lock, timeout_s, busy, is_cancelled)


@dataclass(slots=True, eq=False)
class ClaimGuard:
    """The right to work on one claim, inside `ClaimLocks.hold`.

    It remembers the last successful calls for the claim: when the Prepare ended, and when each call began
    (time.monotonic_ns(); -1 for no call). `wanted` counts the calls that hold the right or wait for it.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    wanted: int = 0
    prepared_ns: int = -1
    prepare_began_ns: int = -1
    unprepare_began_ns: int = -1

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim that began at `moment_ns` or later has ended."""
        return moment_ns <= self.unprepare_began_ns

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded at `moment_ns` or later."""
        return moment_ns <= self.prepared_ns

    def was_prepared_by_call_after(self, moment_ns: int) -> bool:
        """Whether a call that began after `moment_ns` prepared the claim."""
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
            with _in_time(guard.lock, timeout_s, busy, is_cancelled):
                yield guard
        finally:
            with self._lock:
                guard.wanted -= 1
