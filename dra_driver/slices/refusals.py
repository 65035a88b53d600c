"""Slices that the API server refuses as they should be, remembered: one must not hold up the others, nor be sent
again at once. What was accepted before stands in for a refused slice, so that the pool stays whole: no device of a
pool with a slice missing is given out."""

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
"""An administrator mends a missing permission without a change of the slice, and wants to see that it helped."""
_REFUSALS: Final = frozenset({400, 403, 413, 422})
"""Statuses that speak of the content, as opposed to a slice that is gone or was changed."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`wanted` is refused until `due`; `before` is what the server had accepted. `is_whole` says that it refuses what
    stands in as well."""

    wanted: SliceContent
    before: SliceContent
    reason: str
    delay_s: float
    due: float
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Publishable:
    """A pool as it can be written now, and the indexes of its slices that the API server refused: to try them again
    makes no new generation. The `hopeless` ones need not be written now, in whatever form."""

    pool: Pool
    refused: frozenset[int] = frozenset()
    hopeless: frozenset[int] = frozenset()


class RefusedSlices:
    """Of one pool, by index. For the publisher's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: dict[int, _Refusal] = {}

    @property
    def problem(self) -> str | None:
        """The first refusal in the server's words; None if there is none."""
        return next((refusal.reason for refusal in self._refusals.values()), None)

    @property
    def due(self) -> float:
        """When the next one is tried again."""
        return min((refusal.due for refusal in self._refusals.values()), default=math.inf)

    def publishable(self, pool: Pool) -> Publishable:
        """Another content stands in for what was refused. What is due is in the pool as it should be, and so is what
        has changed since."""
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
        """Remember that `sent` was refused for a slice that should have been `wanted`. `stored` is the slice that is
        there. Whether this is such a refusal at all; another error has to be dealt with otherwise."""
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
        """A slice was written."""
        if sent == wanted:
            self._refusals.pop(index, None)


def _content(stored: JsonObject | None) -> SliceContent:
    spec = {} if stored is None else stored["spec"]
    return SliceContent(tuple(spec.get("devices") or ()), tuple(spec.get("sharedCounters") or ()))


def with_stand_ins(pool: Pool, accepted: Mapping[int, SliceContent]) -> Pool:
    """The pool with other content for some slices, by index: of what was `accepted` before, whatever is still wanted
    there. Devices go if the counters that they consume are not published."""
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
