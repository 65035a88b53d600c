"""Locks on physical GPUs, among the threads of this process and against a second instance of the plugin.

While a lock is held, its file says for what: the other instance of a rolling update reads it. What a crash leaves in
the file counts for nothing, because nobody holds the lock.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dra_driver.errors import StateError
from dra_driver.files.atomic import make_directory, open_plain
from dra_driver.files.file_lock import LockBusyError, hold_file, is_locked

_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LockUse:
    """What the lock of a GPU is held for. `began` is a time of time.monotonic(), which all processes of a boot share;
    `since` says the same for people."""

    gpu_uuid: str
    what: str
    began: float
    since: str


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
        self,
        gpu_uuids: Iterable[str],
        timeout_s: float,
        has_left: Callable[[], bool] | None = None,
        uses: Iterable[LockUse] = (),
    ) -> Iterator[None]:
        """Hold the locks of all the GPUs. While the caller waits for one of them, it holds none of the others, so a GPU
        that is busy delays nobody who wants other GPUs. Meanwhile the files tell `uses`, unless the disk is full.

        Raises: LockBusyError if another call keeps one of them for `timeout_s` seconds, or until `has_left` says that
        the kubelet cancelled this call; StateError.
        """
        wanted = sorted(set(gpu_uuids))
        deadline = time.monotonic() + timeout_s
        awaited = wanted[:1]
        told = {use.gpu_uuid: use for use in uses}
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
                    for uuid, use in told.items():
                        held.enter_context(_told(descriptors[uuid], use))
                    yield
                    return

    def uses(self) -> list[LockUse]:
        """What the locks that somebody holds now are held for, as far as their files tell."""
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
                entry = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
            finally:
                os.close(descriptor)
            use = LockUse(
                str(entry["gpu_uuid"]), str(entry["what"]), float(entry["began"]), str(entry["since"])
            )
            return use if path == self._file(use.gpu_uuid) and is_locked(path) else None
        except (OSError, StateError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return None

    def _held(
        self, uuid: str, deadline: float, has_left: Callable[[], bool] | None
    ) -> AbstractContextManager[int]:
        with self._guard:
            lock = self._locks.setdefault(uuid, threading.Lock())
        return hold_file(self._file(uuid), lock, deadline, f"GPU {uuid}", has_left=has_left)

    def _file(self, uuid: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._directory / f"{name}{self._suffix}"


@contextmanager
def _told(descriptor: int, use: LockUse) -> Iterator[None]:
    _write(descriptor, json.dumps(asdict(use)).encode())
    try:
        yield
    except Exception:
        _write(descriptor, b"")
        raise
    _write(descriptor, b"")


def _write(descriptor: int, content: bytes) -> None:
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
