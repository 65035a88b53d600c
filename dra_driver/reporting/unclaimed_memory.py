"""Looks for processes that have had memory on a GPU for ten minutes, and belong to no claim and no container."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from dra_driver.concurrency.worker import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.gpu import GpuProcess

_LOOK_S = 60.0
_REPORT_AFTER_S = 600.0
_JOIN_S = 1.0


class UnclaimedMemory:
    """Reports each process once, and ends none."""

    def __init__(
        self,
        look: Callable[[], Mapping[str, Sequence[GpuProcess]]],
        report: Callable[[str, GpuProcess], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look` returns such processes by the UUID of each GPU that answers; it may raise DraDriverError. `report`
        gets a GPU's UUID and a process. It returns False if somebody else reports for this node."""
        self._look = look
        self._report = report
        self._clock = clock
        self._since: dict[tuple[str, int, str], float] = {}
        self._reported: set[tuple[str, int, str]] = set()
        self._worker = BackgroundWorker(
            "unclaimed-memory",
            self.turn,
            crash_event="unclaimed_memory_failed",
            on_crash=lambda _: _LOOK_S,
        )

    def start(self) -> None:
        """Begin to look."""
        self._worker.start()

    def stop(self) -> None:
        """Look no more; harmless before `start`."""
        self._worker.stop(_JOIN_S)

    def turn(self) -> float:
        """Look once; returns the seconds until the next look."""
        try:
            unclaimed = self._look()
        except DraDriverError:
            return _LOOK_S
        now = self._clock()
        found = {
            (uuid, process.pid, process.name): process
            for uuid, processes in unclaimed.items()
            for process in processes
        }
        # Of a GPU that did not answer nothing is known, so nothing is forgotten.
        kept = {key: since for key, since in self._since.items() if key in found or key[0] not in unclaimed}
        self._since = {key: kept.get(key, now) for key in found | kept}
        self._reported &= self._since.keys()
        for key, process in found.items():
            is_due = now - self._since[key] >= _REPORT_AFTER_S and key not in self._reported
            if is_due and self._report(key[0], process):
                self._reported.add(key)
        return _LOOK_S
