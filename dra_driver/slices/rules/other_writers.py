"""Who else writes the slices of this node, by what the API server records of each write; and how soon the publisher
may write again, so that a fight over the slices does not load the API server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dra_driver.model.schema import JsonObject
from dra_driver.slices.rules.build import Pool

_ONE_TIME_S = 2.0
"""A driver writes its slices one after the other: what comes within this time of the first is one time."""
_CALM_S = 180.0
"""A rival may be away for long: upstream's helper waits 30 s, and so does the slowest of our answers."""
_PROMPT_ANSWERS = 10  # to others who change our slices; a kubelet that starts again is one
_CALM_AFTER_S = 60.0
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class OtherWriter:
    """The field manager of someone else, such as `gpu-kubelet-plugin`, and the slice that it wrote last."""

    manager: str
    slice_name: str


class OtherWriters:
    """Recognises a second writer at the second time that it changes or recreates a slice. Moments are seconds of a
    monotonic clock; `manager` is the field manager of our own writes.

    The first time may be a hand-over: another driver wrote the slices before it was removed.
    """

    def __init__(self, manager: str) -> None:
        self._manager = manager
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._times = 0
        self._began = self._last = -math.inf
        self._writer: OtherWriter | None = None

    def settled(self, slices: Iterable[JsonObject]) -> None:
        """These slices are as they should be, no matter who wrote them."""
        self._seen = frozenset(map(_version, slices))

    def differing(self, slices: Iterable[JsonObject], now: float) -> None:
        """These slices are not what they should be."""
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
        """The writer that has changed slices twice; None once the slices have stayed alone for three minutes."""
        return self._writer if self._times > 1 and now - self._last < _CALM_S else None

    def _other(self, entry: JsonObject) -> str | None:
        """Who wrote this version, if that was someone else. Times are whole seconds: of several writers in one second,
        the one that is not us, since what we wrote would not differ."""
        fields = entry["metadata"].get("managedFields") or ()
        newest = max((str(field.get("time") or "") for field in fields), default="")
        managers = {str(field.get("manager")) for field in fields if str(field.get("time") or "") == newest}
        return min(managers - {self._manager}, default=None)


def _version(entry: JsonObject) -> tuple[str, str]:
    metadata = entry["metadata"]
    return str(metadata.get("uid")), str(metadata.get("resourceVersion"))


class WritePacing:
    """When a write may follow the one before. Moments are seconds of a monotonic clock.

    To write a pool again that did not change is to answer someone who changed the slices. The first answers go out at
    once. Each later one waits twice as long as the one before, until no one touched the slices for a minute. What
    changed on our side never waits for that.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._answers = 0
        self._wrote = -math.inf
        self._needed: float | None = None

    @property
    def contested(self) -> bool:
        """Whether answers are held back."""
        return self._answers >= _PROMPT_ANSWERS

    def lately(self, now: float) -> bool:
        """Whether the last write is so fresh that more may be under way."""
        return now - self._wrote < _CALM_AFTER_S

    def not_needed(self) -> None:
        """The slices are as they should be."""
        self._needed = None

    def wait_s(self, pool: Pool, now: float) -> float:
        """How long the write that is needed now still has to wait."""
        if self._needed is None:
            self._needed = now
            if not self.lately(now):
                self._answers = 0
        if pool != self._pool or not self.contested:
            return 0.0
        delay = min(2.0 ** min(self._answers - _PROMPT_ANSWERS, 10), _LONGEST_WAIT_S)
        return max(0.0, self._needed + delay - now)

    def wrote(self, pool: Pool, now: float) -> None:
        """The pool was written."""
        if pool == self._pool:
            self._answers += 1
        self._pool, self._wrote, self._needed = pool, now, None
