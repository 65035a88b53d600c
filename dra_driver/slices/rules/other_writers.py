"""Detects other writers of this node's slices from the API server's managed fields, and limits how soon the
publisher writes again, so that a conflict does not overload the API server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dra_driver.model.schema import JsonObject
from dra_driver.slices.rules.build import Pool

_ONE_TIME_S = 2.0
"""A driver writes its slices one after the other, so all writes within this time of the first count as one."""
_CALM_S = 180.0
"""How long a writer must be quiet to count as gone. A writer may pause for a while: upstream's helper waits 30 s, as we
do.
"""
_PROMPT_ANSWERS = (
    10  # immediate rewrites after others change our slices; a restarted kubelet, for example, deletes them
)
_CALM_AFTER_S = 60.0
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class OtherWriter:
    """The field manager of another writer, such as `gpu-kubelet-plugin`, and the last slice that it wrote."""

    manager: str
    slice_name: str


class OtherWriters:
    """Detects a second writer when it changes or recreates a slice for the second time. `manager` is our own
    field manager.

    The first time may be a hand-over: another driver wrote the slices before it was removed. Times are
    seconds of a monotonic clock.
    """

    def __init__(self, manager: str) -> None:
        self._manager = manager
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._times = 0
        self._began = self._last = -math.inf
        self._writer: OtherWriter | None = None

    def settled(self, slices: Iterable[JsonObject]) -> None:
        """Records that these slices are correct, no matter who wrote them."""
        self._seen = frozenset(map(_version, slices))

    def differing(self, slices: Iterable[JsonObject], now: float) -> None:
        """Records that these slices are not correct, and who wrote them."""
        for entry in slices:
            manager = None if _version(entry) in self._seen else self._other(entry)
            self._seen |= {_version(entry)}
            if manager is None:
                continue
            if now - self._last >= _CALM_S:
                self._times = 0
            if now - self._began >= _ONE_TIME_S or not self._times:
                self._times, self._began = self._times + 1, now
            self._last = now
            self._writer = OtherWriter(manager, str(entry["metadata"]["name"]))

    def current(self, now: float) -> OtherWriter | None:
        """Returns the writer that has changed slices twice; None after three minutes without changes."""
        return self._writer if self._times > 1 and now - self._last < _CALM_S else None

    def _other(self, entry: JsonObject) -> str | None:
        """Returns who wrote this version, if not us.

        Times are whole seconds. If we and another manager wrote in the same second, it was the other manager, because
        our own write would not differ.
        """
        fields = entry["metadata"].get("managedFields") or ()
        newest = max((str(field.get("time") or "") for field in fields), default="")
        managers = {str(field.get("manager")) for field in fields if str(field.get("time") or "") == newest}
        return min(managers - {self._manager}, default=None)


def _version(entry: JsonObject) -> tuple[str, str]:
    metadata = entry["metadata"]
    return str(metadata.get("uid")), str(metadata.get("resourceVersion"))


class WritePacing:
    """Decides when a write may follow the previous one. Times are seconds of a monotonic clock.

    A write of an unchanged pool reverts a change by another writer. The first such writes are immediate. Each later one
    waits twice as long as the one before, at most 30 s, until the slices have not been changed for a minute. Our own
    changes never wait.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._answers = 0
        self._wrote = -math.inf
        self._needed: float | None = None

    @property
    def contested(self) -> bool:
        """Whether writes that revert another writer's changes are delayed."""
        return self._answers >= _PROMPT_ANSWERS

    def lately(self, now: float) -> bool:
        """Whether the last write is so recent that more writes may follow."""
        return now - self._wrote < _CALM_AFTER_S

    def not_needed(self) -> None:
        """Records that the slices are correct, so no write is needed."""
        self._needed = None

    def wait_s(self, pool: Pool, now: float) -> float:
        """Returns how many seconds a write must still wait."""
        if self._needed is None:
            self._needed = now
            if not self.lately(now):
                self._answers = 0
        if pool != self._pool or not self.contested:
            return 0.0
        delay = min(2.0 ** min(self._answers - _PROMPT_ANSWERS, 10), _LONGEST_WAIT_S)
        return max(0.0, self._needed + delay - now)

    def wrote(self, pool: Pool, now: float) -> None:
        """Records that the pool was written."""
        if pool == self._pool:
            self._answers += 1
        self._pool, self._wrote, self._needed = pool, now, None
