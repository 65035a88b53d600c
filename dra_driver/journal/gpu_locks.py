"""Locks on physical GPUs, among the threads of this process and against a second instance of the driver."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dra_driver.files.atomic import make_directory
from dra_driver.files.file_lock import LockBusyError, hold_file

REFUSE_AFTER_S = 60.0
"""How long an operation may hang on a GPU until nobody waits for that GPU any more."""


@dataclass(frozen=True, slots=True)
class _Hanging:
    """An operation that does not end, and when its GPU was given up (time.monotonic(), and for people)."""

    what: str
    at: float
    since: str


@dataclass(frozen=True, slots=True)
class HeldGpus:
    """The locks of some GPUs, inside `GpuLocks.hold`."""

    _kept: dict[str, tuple[Future[Any], str]] = field(default_factory=dict)

    def keep(self, gpu_uuids: Collection[str], operation: Future[Any], what: str) -> None:
        """An operation hangs on these GPUs, in a thread of its own: their locks stay held after the end of `hold`,
        until it is done. `what` it does is told to whoever wants these GPUs meanwhile."""
        self._kept.update(dict.fromkeys(gpu_uuids, (operation, what)))

    def kept(self, gpu_uuid: str) -> tuple[Future[Any], str] | None:
        """The operation that hangs on a GPU, and what it does; None if there is none."""
        return self._kept.get(gpu_uuid)


class GpuLocks:
    """One lock and one file in `directory` for each GPU UUID."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: dict[str, threading.Lock] = {}
        self._hanging: dict[str, _Hanging] = {}
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(
        self, gpu_uuids: Iterable[str], timeout_s: float, has_left: Callable[[], bool] | None = None
    ) -> Iterator[HeldGpus]:
        """Hold the locks of all the GPUs. While the caller waits for one of them, it holds none of the others, so a GPU
        on which a call hangs delays no claim for other GPUs.

        Raises: LockBusyError if another call keeps one of them for `timeout_s` seconds, or until `has_left` says that
        the kubelet cancelled this call; at once if an operation has hung on one of them for a minute; StateError.
        """
        wanted = sorted(set(gpu_uuids))
        deadline = time.monotonic() + timeout_s
        awaited = wanted[:1]
        while True:
            self._refuse_hanging(wanted, REFUSE_AFTER_S)
            with ExitStack() as held:
                locks: dict[str, ExitStack] = {}
                for uuid in awaited:  # nothing else is held
                    try:
                        locks[uuid] = held.enter_context(self._held(uuid, deadline, has_left))
                    except LockBusyError:
                        self._refuse_hanging([uuid], 0.0)
                        raise
                for uuid in wanted:
                    if uuid in awaited:
                        continue
                    try:
                        locks[uuid] = held.enter_context(self._held(uuid, 0.0, None))
                    except LockBusyError:
                        awaited = [uuid]
                        break
                else:
                    mine = HeldGpus()
                    try:
                        yield mine
                    finally:
                        for uuid, lock in locks.items():
                            self._hand_over(uuid, lock, mine.kept(uuid))
                    return

    @contextmanager
    def _held(self, uuid: str, deadline: float, has_left: Callable[[], bool] | None) -> Iterator[ExitStack]:
        with self._guard:
            lock = self._locks.setdefault(uuid, threading.Lock())
        with ExitStack() as stack:
            stack.enter_context(hold_file(self._file(uuid), lock, deadline, f"GPU {uuid}", has_left=has_left))
            yield stack

    def _hand_over(self, uuid: str, lock: ExitStack, kept: tuple[Future[Any], str] | None) -> None:
        if kept is None:
            return
        operation, what = kept
        mine = lock.pop_all()
        with self._guard:
            since = datetime.now(UTC).strftime("%H:%M:%S")
            self._hanging[uuid] = _Hanging(what, time.monotonic(), since)

        def ended(_operation: Future[Any]) -> None:
            with self._guard:
                del self._hanging[uuid]
            mine.close()

        operation.add_done_callback(ended)

    def _refuse_hanging(self, gpu_uuids: Iterable[str], for_s: float) -> None:
        """Raises: LockBusyError that names the operation if one has hung on a GPU for that long."""
        with self._guard:
            hanging = [(uuid, self._hanging[uuid]) for uuid in gpu_uuids if uuid in self._hanging]
        for uuid, one in hanging:
            if time.monotonic() - one.at >= for_s:
                raise LockBusyError(
                    f"GPU {uuid} does not react: {one.what} had not ended at {one.since} UTC, and still has not; if "
                    "that lasts, restart the pod of the driver on this node, and then the node"
                )

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}.lock"
