"""Tracks the devices and counter sets that the API server rejected: they must not cost the node its other devices.

The slices keep the form of a rejected entry that the server accepted before, or omit the entry. The pool stays
complete, because the scheduler allocates no device of an incomplete pool.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import structlog

from dra_driver.errors import ApiRejectedError
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import named
from dra_driver.slices.rules.build import Pool, SliceContent, has_its_counters
from dra_driver.slices.rules.diff import same_content

_log = structlog.get_logger(__name__)


_FIRST_S = 1.0
_MAX_S = 300.0
_MAX_FORBIDDEN_S = 30.0
"""Shorter, because an administrator fixes a missing permission without changing the slice."""
_REFUSALS: Final = frozenset({400, 403, 413, 422})
"""HTTP status codes that reject the content of a slice."""
_PLACE = re.compile(r"\bspec\.(devices|sharedCounters)\[(\d+)\]")
"""Such as `spec.devices[3].attributes[type]: Invalid value`."""


@dataclass(slots=True)
class _Refusal:
    wanted: JsonObject
    before: JsonObject | None
    error: ApiRejectedError
    due: float
    delay_s: float


class RefusedEntries:
    """The rejected entries of one pool. Only the publisher's thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: list[_Refusal] = []
        self._is_complete = False  # whether the server has all slices of the last pool

    @property
    def problem(self) -> str | None:
        if not self._refusals:
            return None
        names = list(dict.fromkeys(one.wanted["name"] for one in self._refusals))
        return f"{named(names)}: missing or out of date in the slices: {self._refusals[0].error}"

    @property
    def due(self) -> float:
        return min((one.due for one in self._refusals), default=math.inf)

    def publishable(self, pool: Pool) -> Pool:
        """Return the pool with the accepted forms of rejected entries, unless an entry is due or has changed since.

        Entries are retried when the pool is complete without them: those of one slice at a time, and counter sets
        before the devices that consume them, because a change of several slices needs a new generation.
        """
        wanted = [entry for content in pool.slices for entry in content.entries]
        self._refusals = [one for one in self._refusals if one.wanted in wanted]
        if not self._refusals:
            return pool
        now, due = self._clock(), self.due
        retried = [one for one in self._refusals if self._is_complete and one.due == due <= now]
        kept = [one for one in self._refusals if one not in retried]
        for one in retried:
            one.delay_s = min(one.delay_s * 2, _MAX_FORBIDDEN_S if one.error.status == 403 else _MAX_S)
            one.due = now + one.delay_s
        slices = [
            SliceContent(_accepted(content.devices, kept), _accepted(content.shared_counters, kept))
            for content in pool.slices
        ]
        counters = [
            entry for content in pool.slices for entry in _accepted(content.shared_counters, self._refusals)
        ]
        counted = (
            replace(content, devices=tuple(one for one in content.devices if has_its_counters(one, counters)))
            for content in slices
        )
        return replace(pool, slices=tuple(counted))

    def refused(self, content: SliceContent, existing: Sequence[JsonObject], error: Exception) -> bool:
        """Record the entries that the error names, otherwise those that differ from the `existing` slices.

        Returns whether there are any; the caller must handle other errors.
        """
        if not (isinstance(error, ApiRejectedError) and error.status in _REFUSALS):
            return False
        rejected, due = list(_rejected(content, existing, str(error))), self._clock() + _FIRST_S
        new: list[str] = []
        for entry, before in rejected:
            known = next((one for one in self._refusals if entry in (one.wanted, one.before)), None)
            if known is None:
                self._refusals.append(_Refusal(entry, before, error, due, _FIRST_S))
                new.append(entry["name"])
            elif known.before == entry:
                known.before = None
            else:
                known.error = error
        self._is_complete = self._is_complete and not rejected
        if new:
            _log.warning("slice_refused", entries=new, reason=str(error), next_try_in_s=_FIRST_S)
        return bool(rejected)

    def stored(self, *contents: SliceContent, is_complete: bool = False) -> bool:
        """Note that the server has these contents; return whether it rejected any of their entries before."""
        self._is_complete = self._is_complete or is_complete
        before, accepted = self._refusals, [entry for content in contents for entry in content.entries]
        self._refusals = [one for one in before if one.wanted not in accepted]
        return len(self._refusals) < len(before)


def _accepted(entries: Iterable[JsonObject], refusals: Iterable[_Refusal]) -> tuple[JsonObject, ...]:
    kept = (next((one.before for one in refusals if one.wanted == entry), entry) for entry in entries)
    return tuple(entry for entry in kept if entry is not None)


def _rejected(
    content: SliceContent, existing: Sequence[JsonObject], error: str
) -> Iterator[tuple[JsonObject, JsonObject | None]]:
    """Yield each rejected entry and its existing form, if that differs."""
    places = set(_PLACE.findall(error))
    for key, entries in (("devices", content.devices), ("sharedCounters", content.shared_counters)):
        published = {entry["name"]: entry for one in existing for entry in one["spec"].get(key) or ()}
        for index, entry in enumerate(entries):
            before = published.get(entry["name"])
            is_changed = before is None or not same_content(before, entry)
            if (key, str(index)) in places or (is_changed and not places):
                yield entry, before if is_changed else None
