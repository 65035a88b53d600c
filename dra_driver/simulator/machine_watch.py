"""Waiting for the next change of a machine without looking again and again: inotify on its directory."""

from __future__ import annotations

import ctypes
import os
import select
from contextlib import suppress
from pathlib import Path

from dra_driver.simulator.store import STATE_FILE

_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK
_MOVED_TO = 0x80
_MOST_BYTES = 64 * 1024


class MachineWatch:
    """Hears that the machine of a directory was changed, from now on. Every change renames its file into place."""

    def __init__(self, directory: Path) -> None:
        """Raises: OSError where inotify is not to be had: a user has 128 of them by default."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_CLOEXEC_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._descriptor, os.fsencode(directory), _MOVED_TO) < 0:
            number = ctypes.get_errno()
            self.close()
            raise OSError(number, "inotify_add_watch")

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable while there is something to hear."""
        return int(self._descriptor)

    def heard(self) -> bool:
        """Take what is there; whether the machine was changed."""
        changed = False
        with suppress(BlockingIOError):
            while True:
                changed |= STATE_FILE.encode() in os.read(self._descriptor, _MOST_BYTES)
        return changed

    def wait(self, seconds: float) -> None:
        """Return after the next change, or after so many seconds."""
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        waiting.poll(seconds * 1000)
        self.heard()

    def close(self) -> None:
        """End; harmless twice."""
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)
