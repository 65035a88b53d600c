"""Looks for processes that have had memory on a GPU for ten minutes, and belong to no claim and no container."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.gpu import GpuProcess

_LOOK_S = 60.0
_REPORT_AFTER_S = 600.0


@dataclass(eq=False)
class UnclaimedMemory(BackgroundWorker):
    """Reports each process once, and ends none.

    `look` returns such processes by the UUID of each GPU that answers; it may raise DraDriverError. `report`
    gets a GPU's UUID and a process. It returns False if somebody else reports for this node.
    """

    join_s = 1.0
    look: Callable[[], Mapping[str, Sequence[GpuProcess]]]
    report: Callable[[str, GpuProcess], bool]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since: dict[tuple[str, int, str], float] = {}
        self._reported: set[tuple[str, int, str]] = set()
        super().__init__(
            "unclaimed-memory",
            self.turn,
            crash_event="unclaimed_memory_failed",
            on_crash=lambda _: _LOOK_S,
        )

    def turn(self) -> float:
        """Look once; returns the seconds until the next look."""
        try:
            unclaimed = self.look()
        except DraDriverError:
            return _LOOK_S
        now = self.clock()
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
            if is_due and self.report(key[0], process):
                self._reported.add(key)
        return _LOOK_S
