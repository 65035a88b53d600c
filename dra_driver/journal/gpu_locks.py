"""Locks on physical GPUs, among the threads of this process and against a second instance of the driver."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from dra_driver.files.atomic import make_directory
from dra_driver.files.file_lock import LockBusyError, hold_file


class GpuLocks:
    """One lock and one file in `directory` for each GPU UUID, for one purpose: another `suffix` is another lock."""

    def __init__(self, directory: Path, suffix: str = ".lock") -> None:
        self._directory = directory
        self._suffix = suffix
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(
        self, gpu_uuids: Iterable[str], timeout_s: float, has_left: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Hold the locks of all the GPUs. While the caller waits for one of them, it holds none of the others, so a GPU
        that is busy delays nobody who wants other GPUs.

        Raises: LockBusyError if another call keeps one of them for `timeout_s` seconds, or until `has_left` says that
        the kubelet cancelled this call; StateError.
        """
        wanted = sorted(set(gpu_uuids))
        deadline = time.monotonic() + timeout_s
        awaited = wanted[:1]
        while True:
            with ExitStack() as held:
                for uuid in awaited:  # nothing else is held
                    held.enter_context(self._held(uuid, deadline, has_left))
                for uuid in wanted:
                    if uuid in awaited:
                        continue
                    try:
                        held.enter_context(self._held(uuid, 0.0, None))
                    except LockBusyError:
                        awaited = [uuid]
                        break
                else:
                    yield
                    return

    def _held(
        self, uuid: str, deadline: float, has_left: Callable[[], bool] | None
    ) -> AbstractContextManager[object]:
        with self._guard:
            lock = self._locks.setdefault(uuid, threading.Lock())
        return hold_file(self._file(uuid), lock, deadline, f"GPU {uuid}", has_left=has_left)

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}{self._suffix}"
