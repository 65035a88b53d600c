"""Why claims that have no devices yet get none: each is tried on the nodes as they are, less what other claims have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.validation.machine_fit import MachineFit

JsonObject = dict[str, Any]

_MOST_KINDS = 40
"""Nodes that look the same are tried once; a claim is tried on so many kinds of nodes."""
_OWN = frozenset({"uuid", "pciBusID", "index", "minor", "parentUUID", "parentIndex", "parentMinor"})
"""Attributes that differ on every machine and that hardly any claim selects by."""
_RELATED = frozenset({"nvlinkDomain", "pcieRoot", "numaNode"})
"""Attributes whose values matter by being equal."""


@dataclass(frozen=True, slots=True)
class PendingClaim:
    """A claim without devices. `reasons` are why nodes cannot serve it, each with how many nodes; `fits` are nodes that
    could serve it now; `untried` is how many nodes were not looked at."""

    namespace: str
    name: str
    reasons: tuple[tuple[str, int], ...]
    fits: tuple[str, ...]
    untried: int = 0


def pending_claims(
    driver: str,
    claims: Sequence[JsonObject],
    pools: Mapping[str, Sequence[JsonObject]],
    classes: Sequence[JsonObject],
    namespace: str | None = None,
) -> list[PendingClaim]:
    """The claims that ask for devices of the driver and have none, in v1 shape as all else; `pools` are whole pools of
    slices by name. A claim that is being deleted is not pending."""
    by_name = {entry["metadata"]["name"]: entry for entry in classes}
    ours = {name for name, entry in by_name.items() if driver in json.dumps(entry.get("spec") or {})}
    waiting = [claim for claim in claims if _waits(claim, ours) and _is_in(claim, namespace)]
    if not waiting:
        return []
    holding: dict[str, list[JsonObject]] = {}
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for pool in {result["pool"] for result in (allocation.get("devices") or {}).get("results") or ()}:
            holding.setdefault(pool, []).append(claim)
    kinds: dict[str, list[str]] = {}
    for pool, slices in pools.items():
        kinds.setdefault(_looks(pool, slices, holding.get(pool, ())), []).append(pool)
    common = sorted(kinds.values(), key=len, reverse=True)
    machines = [
        (MachineFit(alike[0], driver, pools[alike[0]]), holding.get(alike[0], ()), alike)
        for alike in common[:_MOST_KINDS]
    ]
    untried = sum(map(len, common[_MOST_KINDS:]))
    return [_tried(claim, machines, by_name, untried) for claim in waiting]


def _tried(
    claim: JsonObject,
    machines: Iterable[tuple[MachineFit, Sequence[JsonObject], Sequence[str]]],
    classes: Mapping[str, JsonObject],
    untried: int,
) -> PendingClaim:
    reasons: dict[str, int] = {}
    fits: list[str] = []
    for machine, others, nodes in machines:
        alone = machine.claim(claim["spec"], classes)
        if alone.problem is not None:
            reasons[alone.problem] = reasons.get(alone.problem, 0) + len(nodes)
        elif others and machine.claim(claim["spec"], classes, others).problem is not None:
            reason = "its devices would do, but other claims have them"
            reasons[reason] = reasons.get(reason, 0) + len(nodes)
        else:
            fits += nodes
    metadata = claim["metadata"]
    ranked = tuple(sorted(reasons.items(), key=lambda pair: -pair[1]))
    return PendingClaim(metadata.get("namespace", ""), metadata["name"], ranked, tuple(fits), untried)


def _waits(claim: JsonObject, ours: set[str]) -> bool:
    if (claim.get("status") or {}).get("allocation") or claim["metadata"].get("deletionTimestamp"):
        return False
    requests = (claim["spec"].get("devices") or {}).get("requests") or ()
    bodies = [
        body
        for entry in requests
        for body in (entry.get("exactly"), *(entry.get("firstAvailable") or ()))
        if body
    ]
    return any(body.get("deviceClassName") in ours for body in bodies)


def _is_in(claim: JsonObject, namespace: str | None) -> bool:
    return namespace is None or claim["metadata"].get("namespace") == namespace


def _looks(pool: str, slices: Sequence[JsonObject], holding: Sequence[JsonObject]) -> str:
    """What a node has and what is taken of it, without what makes it this node."""
    numbers: dict[str, int] = {}
    values: dict[tuple[str, str], int] = {}
    devices = []
    for entry in slices:
        for device in entry["spec"].get("devices") or ():
            numbers[device["name"]] = len(numbers)
            devices.append(_content(device, values))
    taken = sorted(
        (numbers.get(result["device"], -1), json.dumps(result.get("consumedCapacity") or {}, sort_keys=True))
        for claim in holding
        for result in claim["status"]["allocation"]["devices"]["results"]
        if result["pool"] == pool and not result.get("adminAccess")
    )
    return json.dumps([devices, taken], sort_keys=True)


def _content(device: JsonObject, values: dict[tuple[str, str], int]) -> JsonObject:
    attributes = {}
    for name, value in (device.get("attributes") or {}).items():
        short = name.rpartition("/")[2]
        if short in _RELATED:
            text = json.dumps(value)
            attributes[name] = values.setdefault((short, text), len(values))
        elif short not in _OWN:
            attributes[name] = value
    taints = [(taint["key"], taint["effect"]) for taint in device.get("taints") or ()]
    counters = [
        [entry["counters"] for entry in device.get("consumesCounters") or ()],
        device.get("allowMultipleAllocations"),
    ]
    return {
        "attributes": attributes,
        "capacity": device.get("capacity"),
        "taints": taints,
        "counters": counters,
    }
