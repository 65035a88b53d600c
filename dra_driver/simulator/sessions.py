"""NVML sessions that are open on a machine, of all processes.

The real driver counts a session as a client of every GPU. While one is open, it refuses to be unloaded, to reset a GPU,
and to switch a MIG mode for anybody else. Here each session is a locked file, so that a process that dies ends its own.
The caller of each method holds the machine's lock.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import uuid
from contextlib import suppress
from pathlib import Path

_PROCESS = uuid.uuid4().hex[:8]  # process IDs of different PID namespaces may be equal
_numbers = itertools.count(1)


class Session:
    """One open session. It ends also when nobody has the object any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def begin(self) -> None:
        """Make the file and lock it; nothing happens where the directory cannot be written."""
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def end(self) -> None:
        """Remove the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class Sessions:
    """The files in `<machine>/sessions`, named `<mark of the process>.<process>.<number>.<name>`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, name: str) -> Session:
        """Begin a session."""
        session = Session(self._directory / f"{_PROCESS}.{os.getpid()}.{next(_numbers)}.{name}")
        session.begin()
        return session

    def of_others(self) -> list[str]:
        """Name and process of every open session of other processes, such as `dcgm (process 4711)`: NVML opens the
        device files once in a process."""
        return [text for mark, text in self._all() if mark != _PROCESS]

    def of_all(self) -> list[str]:
        """As `of_others`, with this process."""
        return [text for _, text in self._all()]

    def _all(self) -> list[tuple[str, str]]:
        try:
            paths = sorted(self._directory.iterdir())
        except OSError:
            return []
        found = []
        for path in paths:
            mark, pid, _, name = path.name.split(".", 3)
            if _is_open(path):
                found.append((mark, f"{name} (process {pid})"))
        return found


def _is_open(path: Path) -> bool:
    """Whether a process holds the file; one that nobody holds is removed."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
