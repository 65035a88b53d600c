"""Locks on GPUs, between processes.

An operation holds the lock file of its GPU, and so do the programs that it starts. So it also waits for
programs of a killed plugin, hanging threads of one that has handed over, and `gpu-dra-driver cleanup --now`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from dra_driver.base.atomic import make_directory
from dra_driver.base.bounded_program import inherited
from dra_driver.base.file_lock import hold_file, is_locked


class GpuLocks:
    """A lock is a file in `directory`, which is never removed. Methods raise StateError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        make_directory(self._directory, 0o700)

    @contextmanager
    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> Iterator[None]:
        """If this process is killed, the GPUs stay locked until the last program that the block has started
        exits. The end of the block waits for such programs too.

        Raises: LockBusyError if another process keeps a lock for `timeout_s` seconds.
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
        return is_locked(self._file(gpu_uuid))

    def held(self) -> list[str]:
        return [
            uuid for path in sorted(self._directory.glob("GPU-*.lock")) if self.is_held(uuid := path.stem)
        ]

    def _held(self, uuid: str, deadline: float) -> AbstractContextManager[int]:
        busy = f"another process of gpu-dra-driver still works on GPU {uuid}; if this lasts, drain and reboot the node"
        return hold_file(self._file(uuid), deadline, busy)

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}.lock"
