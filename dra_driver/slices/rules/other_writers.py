"""Detects other writers of this node's slices from the API server's managed fields."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dra_driver.model.dataclass import dataclass
from dra_driver.model.schema import JsonObject

_ONE_TIME_S = 2.0
"""A driver writes its slices one after the other; writes within this time count as one."""
_CALM_S = 180.0
"""How long a writer must be quiet to count as gone. Upstream's helper may wait 30 s, as we do."""


@dataclass(frozen=True, slots=True)
class OtherWriter:
    """A field manager, such as `gpu-kubelet-plugin`, and the last slice that it wrote."""

    manager: str
    slice_name: str


class OtherWriters:
    """Detects a second writer when it changes or recreates a slice for the second time.

    The first time may be a hand-over from a driver that was removed. Times are seconds of a monotonic clock.
    """

    def __init__(self, manager: str) -> None:
        self._manager = manager
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._times = 0
        self._began = self._last = -math.inf
        self._writer: OtherWriter | None = None

    def settled(self, slices: Iterable[JsonObject]) -> None:
        self._seen = frozenset(map(_version, slices))

    def differing(self, slices: Iterable[JsonObject], now: float) -> None:
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
        return self._writer if self._times > 1 and now - self._last < _CALM_S else None

    def _other(self, entry: JsonObject) -> str | None:
        """Return who wrote this version, if not us.

        If two managers wrote in the same second, it was the other one, because our own write would not differ.
        """
        fields = entry["metadata"].get("managedFields") or ()
        newest = max((str(field.get("time") or "") for field in fields), default="")
        managers = {str(field.get("manager")) for field in fields if str(field.get("time") or "") == newest}
        return min(managers - {self._manager}, default=None)


def _version(entry: JsonObject) -> tuple[str, str]:
    metadata = entry["metadata"]
    return str(metadata.get("uid")), str(metadata.get("resourceVersion"))
