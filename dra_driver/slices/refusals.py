"""Tracks slices that the API server rejected. A rejected slice must not delay the others, nor be sent again at once.

The previously accepted content replaces a rejected slice so that the pool stays complete, because the
scheduler allocates no device of an incomplete pool.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from dra_driver.errors import ApiRejectedError
from dra_driver.model.schema import JsonObject
from dra_driver.slices.rules.build import Pool, SliceContent, has_its_counters

_log = structlog.get_logger(__name__)


_FIRST_S = 1.0
_MAX_S = 300.0
_MAX_FORBIDDEN_S = 30.0
"""Shorter, because an administrator fixes a missing permission without changing the slice, and wants to see soon
whether that helped.
"""
_REFUSALS: Final = frozenset({400, 403, 413, 422})
"""HTTP status codes that reject the content of a slice. Other codes mean, for example, that the slice is gone."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The server rejected `wanted`, which is retried at `due`. `before` is the content that the server had accepted.
    `is_whole`: the server also rejects `before`.
    """

    wanted: SliceContent
    before: SliceContent
    reason: str
    delay_s: float
    due: float
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Publishable:
    """A pool that can be written now.

    `refused` are the indexes of rejected slices, whose retry needs no new generation. Slices with an index in
    `hopeless` are not written now at all.
    """

    pool: Pool
    refused: frozenset[int] = frozenset()
    hopeless: frozenset[int] = frozenset()


class RefusedSlices:
    """The rejected slices of one pool, by index. Only the publisher's thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: dict[int, _Refusal] = {}

    @property
    def problem(self) -> str | None:
        """The server's error for the first rejected slice; None if no slice is rejected."""
        return next((refusal.reason for refusal in self._refusals.values()), None)

    @property
    def due(self) -> float:
        """When the next slice is retried."""
        return min((refusal.due for refusal in self._refusals.values()), default=math.inf)

    def publishable(self, pool: Pool) -> Publishable:
        """Returns the pool with replacements for rejected slices, unless a slice is due or has changed since."""
        self._refusals = {
            index: refusal
            for index, refusal in self._refusals.items()
            if index < len(pool.slices) and pool.slices[index] == refusal.wanted
        }
        now = self._clock()
        waiting = {index: refusal for index, refusal in self._refusals.items() if refusal.due > now}
        return Publishable(
            with_stand_ins(pool, {index: refusal.before for index, refusal in waiting.items()}),
            frozenset(self._refusals),
            frozenset(index for index, refusal in waiting.items() if refusal.is_whole),
        )

    def refused(
        self,
        index: int,
        wanted: SliceContent,
        sent: SliceContent,
        stored: JsonObject | None,
        error: Exception,
    ) -> bool:
        """Records that `sent` was rejected for a slice that should have been `wanted`. `stored` is the
        existing slice.

        Returns whether `error` is such a rejection; the caller must handle other errors.
        """
        if not (isinstance(error, ApiRejectedError) and error.status in _REFUSALS):
            return False
        known = self._refusals.get(index)
        if known is not None and sent != wanted:
            self._refusals[index] = replace(known, is_whole=True)
            return True
        most_s = _MAX_FORBIDDEN_S if error.status == 403 else _MAX_S
        delay = _FIRST_S if known is None else min(known.delay_s * 2, most_s)
        before = known.before if known is not None and stored is None else _content(stored)
        self._refusals[index] = _Refusal(wanted, before, str(error), delay, self._clock() + delay)
        if known is None:
            _log.warning("slice_refused", index=index, reason=str(error), next_try_in_s=delay)
        return True

    def written(self, index: int, wanted: SliceContent, sent: SliceContent) -> None:
        """Call this after a slice was written."""
        if sent == wanted:
            self._refusals.pop(index, None)


def _content(stored: JsonObject | None) -> SliceContent:
    spec = {} if stored is None else stored["spec"]
    return SliceContent(tuple(spec.get("devices") or ()), tuple(spec.get("sharedCounters") or ()))


def with_stand_ins(pool: Pool, accepted: Mapping[int, SliceContent]) -> Pool:
    """Returns the pool with the last accepted content for rejected slices.

    `accepted` maps slice indexes to this content. Leaves out devices and counter sets that are no longer wanted, and
    devices without their counters.
    """
    if not accepted:
        return pool
    slices = [
        _still_wanted(accepted[index], content) if index in accepted else content
        for index, content in enumerate(pool.slices)
    ]
    counters = [entry for content in slices for entry in content.shared_counters]
    return replace(pool, slices=tuple(_countable(content, counters) for content in slices))


def _still_wanted(before: SliceContent, wanted: SliceContent) -> SliceContent:
    return SliceContent(
        _named_alike(before.devices, wanted.devices),
        _named_alike(before.shared_counters, wanted.shared_counters),
    )


def _named_alike(before: Iterable[JsonObject], wanted: Iterable[JsonObject]) -> tuple[JsonObject, ...]:
    names = {entry["name"] for entry in wanted}
    return tuple(entry for entry in before if entry["name"] in names)


def _countable(content: SliceContent, counters: Iterable[JsonObject]) -> SliceContent:
    kept = (device for device in content.devices if has_its_counters(device, counters))
    return replace(content, devices=tuple(kept))
