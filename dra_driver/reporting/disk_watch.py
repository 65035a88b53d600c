"""Directories that take no files: what every claim needs, and what no other part notices before a claim comes."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dra_driver.base.atomic import WRITES, WriteOutcomes, state_error
from dra_driver.base.threads import BoundedCall
from dra_driver.model.problems import NodeProblem

_HANGS_AFTER_S = 30.0
_PROBE_EVERY_S = 5.0
_SIZES_EVERY_S = 10.0
_PROBE = bytes(4096)
"""A full disk may still take an empty file."""


class DiskWatch:
    """Finds directories that take no files: those in which the last write failed, in which one does not return, or
    whose file system is full or read-only. After a failure it tries a small file there every few seconds, so that the
    problem ends on evidence. At rest it writes nothing.

    `write` writes a file durably and raises StateError.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        write: Callable[[Path, bytes], None],
        outcomes: WriteOutcomes = WRITES,
    ) -> None:
        self._directories = directories
        self._write = write
        self._outcomes = outcomes
        self._lock = threading.Lock()
        self._probed: Path | None = None
        self._probe_again_at = 0.0
        self._probing = BoundedCall("the disk", self._probe)
        self._refusing: Mapping[Path, str] = {}
        self._sizes_again_at = -math.inf
        self._sizing = BoundedCall("the size of the disk", self._read_sizes)

    def problems(self) -> Sequence[NodeProblem]:
        """One for each directory that takes no files now. It waits for no disk."""
        self._read_sizes_soon()
        found = ((top, self._fault(top)) for top in self._directories)
        return [NodeProblem("disk-not-writable", text, str(top)) for top, text in found if text is not None]

    def _fault(self, top: Path) -> str | None:
        hangs_s = self._outcomes.hanging_in(top)
        if hangs_s is not None and hangs_s > _HANGS_AFTER_S:
            return (
                f"A write in {top} has not returned for {hangs_s:.0f} s, so no claim can be prepared; check the disk "
                "of this directory (`dmesg`), then drain and reboot the node"
            )
        failed = self._outcomes.failed_in(top)
        if failed is not None:
            self._probe_soon(failed[0])
            return f"The plugin {failed[1]}"
        refusal = self._refusing.get(top)
        return None if refusal is None else f"The plugin {refusal}"

    def _probe_soon(self, directory: Path) -> None:
        with self._lock:
            if self._probing.is_asking or time.monotonic() < self._probe_again_at:
                return
            self._probe_again_at = time.monotonic() + _PROBE_EVERY_S
            self._probed = directory
            self._probing.ask()

    def _read_sizes_soon(self) -> None:
        """In another thread, and one call at a time: on a disk that hangs this call may hang too."""
        with self._lock:
            if self._sizing.is_asking or time.monotonic() < self._sizes_again_at:
                return
            self._sizes_again_at = time.monotonic() + _SIZES_EVERY_S
            self._sizing.ask()

    def _read_sizes(self) -> None:
        found = ((top, _refusal(top)) for top in self._directories)
        self._refusing = {top: text for top, text in found if text is not None}

    def _probe(self) -> None:
        """Write and remove a file. Its outcome is noted as that of any other write."""
        if self._probed is None:
            return
        if not self._probed.is_dir() and self._probed not in self._directories:
            self._outcomes.forget(self._probed)
            return
        file = self._probed / ".write-probe"
        self._write(file, _PROBE)
        with suppress(OSError):
            file.unlink()


def _refusal(directory: Path) -> str | None:
    """The error that a write would have now; None if it may succeed, if the file system reports no sizes, or if the
    directory does not exist yet. On a read-only file system a Prepare fails at its lock, before it writes anything."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    if disk.f_flag & os.ST_RDONLY:
        return str(state_error("write in", directory, OSError(errno.EROFS, "")))
    if (disk.f_blocks > 0 and disk.f_bfree == 0) or (disk.f_files > 0 and disk.f_ffree == 0):
        return str(state_error("write in", directory, OSError(errno.ENOSPC, "")))
    return None
