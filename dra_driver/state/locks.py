"""Locks on physical GPUs, within this process and against a second instance of the plugin."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dra_driver.state.filelock import hold_file
from dra_driver.state.files import make_directory


class GpuLocks:
    """One lock and one file a GPU UUID, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory. Raises: StateError."""
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> Iterator[None]:
        """Hold the locks of all the GPUs, taken in one order so that no two callers wait for each other.

        Raises: RetryableError if they cannot be had within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with ExitStack() as stack:
            for uuid in sorted(set(gpu_uuids)):
                with self._guard:
                    lock = self._locks.setdefault(uuid, threading.Lock())
                stack.enter_context(hold_file(self._file(uuid), lock, deadline, f"GPU {uuid}"))
            yield

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}.lock"
