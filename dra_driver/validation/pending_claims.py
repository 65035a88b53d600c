"""Why claims that have no devices yet get none: each is tried on the nodes as they are, less what other claims have."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

from dra_driver.errors import DraDriverError
from dra_driver.validation.machine_fit import Fit, MachineFit
from dra_driver.validation.rules.cel.values import NotJudgedError

JsonObject = dict[str, Any]

_MOST_KINDS = 200
_MOST_DEVICES = 4000
"""Nodes that look the same are tried once; a claim is tried on so many kinds of nodes, with so many devices together.
"""
_MOST_SPECS = 25
"""Claims that ask for the same are tried once; so many different ones are."""
_OWN = frozenset({"uuid", "pciBusID", "index", "minor", "serial"})
"""Attributes that differ from device to device."""
_RELATED = frozenset(
    {"nvlinkDomain", "pcieRoot", "numaNode", "parentUUID", "parentIndex", "parentMinor"}
    | {"fabricClusterUUID", "fabricCliqueID"}
)
"""Attributes whose values matter by being equal, where no selector names them."""


@dataclass(frozen=True, slots=True)
class PendingClaim:
    """A claim without devices. `reasons` are why nodes cannot serve it, each with how many nodes; `fits` are nodes that
    could serve it now; `untried` is how many nodes were not looked at; `unknown` says why it could not be judged.
    `kind` is that of the object: a pod that asks by an extended resource has no claim before it has a node."""

    namespace: str
    name: str
    kind: str = "ResourceClaim"
    reasons: tuple[tuple[str, int], ...] = ()
    fits: tuple[str, ...] = ()
    untried: int = 0
    unknown: str | None = None


_TOO_MANY = PendingClaim(
    "", "", unknown=f"only the first {_MOST_SPECS} different claims are; ask for a namespace"
)


def pending_claims(
    driver: str,
    claims: Sequence[JsonObject],
    pools: Mapping[str, Sequence[JsonObject]],
    classes: Sequence[JsonObject],
    namespace: str | None = None,
) -> list[PendingClaim]:
    """The claims that ask for devices of the driver, or of a class that is not there, and have none. All in v1 shape;
    `pools` are whole pools of slices by name. A claim that is being deleted is not pending."""
    by_name = {entry["metadata"]["name"]: entry for entry in classes}
    ours = {name for name, entry in by_name.items() if driver in json.dumps(entry.get("spec") or {})}
    waiting = [claim for claim in claims if _waits(claim) and _is_in(claim, namespace)]
    cluster = _Cluster(driver, claims, pools, by_name, ours)
    verdicts: dict[str, PendingClaim] = {}  # pods of one template have claims with one spec
    found = []
    for claim in waiting:
        if not {name for name in _class_names(claim) if name in ours or name not in by_name}:
            continue
        key = json.dumps(claim["spec"], sort_keys=True)
        if key not in verdicts:
            verdicts[key] = cluster.verdict(claim) if len(verdicts) < _MOST_SPECS else _TOO_MANY
        metadata = claim["metadata"]
        found.append(
            replace(
                verdicts[key],
                namespace=metadata.get("namespace", ""),
                name=metadata["name"],
                kind=claim.get("kind") or "ResourceClaim",
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Kind:
    """Nodes that look the same to a claim: one of them, what other claims have there, and all their names."""

    machine: MachineFit
    others: Sequence[JsonObject]
    nodes: tuple[str, ...]


class _Cluster:
    """All nodes, put into kinds once for each set of attributes that selectors name."""

    def __init__(
        self,
        driver: str,
        claims: Sequence[JsonObject],
        pools: Mapping[str, Sequence[JsonObject]],
        classes: Mapping[str, JsonObject],
        ours: Collection[str],
    ) -> None:
        self._driver = driver
        self._pools = pools
        self._classes = classes
        self._ours = ours
        self._kinds: dict[frozenset[str], tuple[list[_Kind], int]] = {}
        self._holding: dict[str, list[JsonObject]] = {}
        for claim in claims:
            for pool in {result["pool"] for result in _results(claim, driver)}:
                self._holding.setdefault(pool, []).append(claim)

    def verdict(self, claim: JsonObject) -> PendingClaim:
        names = set(_class_names(claim))
        missing = sorted(names - set(self._classes))
        if missing:
            return PendingClaim(
                "", "", reasons=((f"there is no DeviceClass {missing[0]}", len(self._pools)),)
            )
        foreign = sorted(names - set(self._ours))
        if foreign:
            return PendingClaim("", "", unknown=f"class {foreign[0]} is of another driver")
        kinds, untried = self._kinds_for(_named(claim, self._classes))
        try:
            return self._tried(claim["spec"], kinds, untried)
        except (DraDriverError, NotJudgedError) as error:  # such a claim must not hide the others
            return PendingClaim("", "", unknown=str(error))

    def _tried(self, spec: JsonObject, kinds: Iterable[_Kind], untried: int) -> PendingClaim:
        reasons: Counter[str] = Counter()
        best: dict[str, tuple[int, int, str]] = {}
        fits: list[str] = []
        for kind in kinds:
            alone = kind.machine.claim(spec, self._classes)
            if alone.problem is not None:
                reasons[alone.problem] += len(kind.nodes)
            elif kind.others and kind.machine.claim(spec, self._classes, kind.others).problem is not None:
                reason, free, matching = _taken_away(alone, kind.machine.free(kind.others))
                reasons[reason] += len(kind.nodes)
                best[reason] = max(best.get(reason, (-1, 0, "")), (free, matching, kind.nodes[0]))
            else:
                fits += kind.nodes
        texts = {
            reason: f"{reason} ({free} of {matching} matching devices are free on {node}, the best of them)"
            for reason, (free, matching, node) in best.items()
        }
        ranked = tuple((texts.get(reason, reason), number) for reason, number in reasons.most_common())
        return PendingClaim("", "", reasons=ranked, fits=tuple(fits), untried=untried)

    def _kinds_for(self, named: frozenset[str]) -> tuple[list[_Kind], int]:
        if named not in self._kinds:
            alike: dict[str, list[str]] = {}
            for pool, slices in self._pools.items():
                results = [
                    result
                    for claim in self._holding.get(pool, ())
                    for result in _results(claim, self._driver)
                    if result["pool"] == pool and not result.get("adminAccess")
                ]
                alike.setdefault(_looks(slices, results, named), []).append(pool)
            common = sorted(alike.values(), key=len, reverse=True)
            sizes = accumulate(self._size(nodes[0]) for nodes in common)
            tried = max(1, sum(size <= _MOST_DEVICES for size in islice(sizes, _MOST_KINDS)))
            self._kinds[named] = (
                [self._kind(nodes) for nodes in common[:tried]],
                sum(map(len, common[tried:])),
            )
        return self._kinds[named]

    def _size(self, pool: str) -> int:
        return sum(len(entry["spec"].get("devices") or ()) for entry in self._pools[pool])

    def _kind(self, nodes: Sequence[str]) -> _Kind:
        first = nodes[0]
        slices, others = self._pools[first], self._holding.get(first, ())
        return _Kind(MachineFit(first, self._driver, slices), others, tuple(nodes))


def _taken_away(alone: Fit, free: Collection[str]) -> tuple[str, int, int]:
    """Why a claim that an empty node could serve does not fit beside others; of the request that lacks most, how many
    devices are free and how many match."""
    wanted = Counter(request for request, _ in alone.devices)
    matching = {found.request: found.matching for found in alone.funnels if found.request in wanted}
    left = {request: len([name for name in names if name in free]) for request, names in matching.items()}
    request = min(matching, key=lambda name: left[name] - wanted[name])
    text = f"request {request}: wants {wanted[request]}, other claims have them"
    return text, left[request], len(matching[request])


def _results(claim: JsonObject, driver: str) -> list[JsonObject]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    return [result for result in results if result.get("driver") == driver]


def _waits(claim: JsonObject) -> bool:
    allocation = (claim.get("status") or {}).get("allocation")
    return not allocation and not claim["metadata"].get("deletionTimestamp")


def _is_in(claim: JsonObject, namespace: str | None) -> bool:
    return namespace is None or claim["metadata"].get("namespace") == namespace


def _bodies(claim: JsonObject) -> Iterator[JsonObject]:
    for entry in (claim["spec"].get("devices") or {}).get("requests") or ():
        if entry.get("exactly"):
            yield entry["exactly"]
        yield from entry.get("firstAvailable") or ()


def _class_names(claim: JsonObject) -> Iterator[str]:
    for body in _bodies(claim):
        yield str(body.get("deviceClassName"))


def _named(claim: JsonObject, classes: Mapping[str, JsonObject]) -> frozenset[str]:
    """The attributes of which a selector may want a certain value."""
    bodies = [*_bodies(claim), *(classes[name].get("spec") or {} for name in _class_names(claim))]
    text = "\n".join(
        selector["cel"]["expression"] for body in bodies for selector in body.get("selectors") or ()
    )
    return frozenset(name for name in _OWN | _RELATED if re.search(rf"\b{name}\b(?!\()", text))


def _looks(slices: Sequence[JsonObject], taken: Iterable[JsonObject], named: frozenset[str]) -> str:
    """What a node has and what is taken of it, without what makes it this node; in any order of its GPUs."""
    held: dict[str, list[JsonObject]] = {}
    for result in taken:
        held.setdefault(result["device"], []).append(result.get("consumedCapacity") or {})
    devices = [device for entry in slices for device in entry["spec"].get("devices") or ()]
    often = Counter(value for device in devices for value in _relations(device))
    numbers = {value: number for number, value in enumerate(value for value in often if often[value] > 1)}
    counters = {
        entry["name"]: entry["counters"]
        for content in slices
        for entry in content["spec"].get("sharedCounters") or ()
    }
    gpus: dict[str, list[JsonObject]] = {}
    for device in devices:
        consumed = device.get("consumesCounters") or ()
        gpu = " ".join(sorted(one["counterSet"] for one in consumed)) or f"device {device['name']}"
        content = _content(device, numbers, named)
        content["held"] = sorted(repr(one) for one in held.get(device["name"], ()))
        content["of"] = [counters.get(one["counterSet"]) for one in consumed]
        gpus.setdefault(gpu, []).append(content)
    return " ".join(sorted(repr(one) for one in gpus.values()))


def _relations(device: JsonObject) -> Iterator[tuple[str, str]]:
    for name, value in (device.get("attributes") or {}).items():
        if name.rpartition("/")[2] in _RELATED:
            yield name, repr(value)


def _content(device: JsonObject, numbers: Mapping[tuple[str, str], int], named: frozenset[str]) -> JsonObject:
    attributes = {}
    for name, value in (device.get("attributes") or {}).items():
        short = name.rpartition("/")[2]
        if short in named:
            attributes[name] = value
        elif short in _RELATED:
            attributes[name] = numbers.get((name, repr(value)))
        elif short not in _OWN:
            attributes[name] = value
    return {
        "attributes": attributes,
        "capacity": device.get("capacity"),
        "taints": [
            (taint["key"], taint.get("value"), taint["effect"]) for taint in device.get("taints") or ()
        ],
        "counters": [entry["counters"] for entry in device.get("consumesCounters") or ()],
        "shared": device.get("allowMultipleAllocations"),
    }
