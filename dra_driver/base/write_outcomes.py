"""How this process's writes ended: in which directories the last one failed, and which do not return."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.errors import StateError

_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})
"""Others are faults of one file, such as a directory in its place."""


class WriteOutcomes:
    """How the last write in each directory ended, and which writes are under way. For many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[Path, float]] = {}
        self._failed: dict[Path, str] = {}

    @contextmanager
    def writing(self, directory: Path, *, is_whole: bool = True) -> Iterator[None]:
        """Around each write in a directory. One that is not whole opens, removes or syncs a file: if it succeeds, a
        write may still fail, so that ends no problem. Raises: the StateError of the write."""
        number = next(self._numbers)
        with self._lock:
            self._under_way[number] = (directory, time.monotonic())
        failure, is_disk = None, False
        try:
            yield
        except StateError as error:
            failure = str(error)
            is_disk = getattr(error.__cause__, "errno", None) in _OF_THE_DISK
            raise
        finally:
            with self._lock:
                del self._under_way[number]
                if failure is None and is_whole:
                    self._failed.pop(directory, None)
                elif failure is not None and is_disk:
                    self._failed[directory] = failure

    def failed_in(self, top: Path) -> tuple[Path, str] | None:
        """A directory at or below `top` in which the last write failed, and the error; None if there is none."""
        with self._lock:
            return next(((at, text) for at, text in self._failed.items() if at.is_relative_to(top)), None)

    def forget(self, directory: Path) -> None:
        """The directory is gone, so nothing is to be written there."""
        with self._lock:
            self._failed.pop(directory, None)

    def hanging_in(self, top: Path) -> float | None:
        """For how many seconds the oldest write at or below `top` has been under way, None if there is none."""
        with self._lock:
            began = [since for at, since in self._under_way.values() if at.is_relative_to(top)]
        return time.monotonic() - min(began) if began else None


WRITES = WriteOutcomes()
"""Those of this process."""
