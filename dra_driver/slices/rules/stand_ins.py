"""What is published in the place of a slice that the API server refuses, so that the pool stays whole: no device of a
pool with a slice missing is given out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dra_driver.model.json_object import JsonObject
from dra_driver.slices.rules.api_limits import has_its_counters
from dra_driver.slices.rules.build import Pool, SliceContent


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
