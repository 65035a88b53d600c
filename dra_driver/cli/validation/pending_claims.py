"""Why claims that have no devices yet get none: each is tried on the nodes as they are, less what other claims have."""

from __future__ import annotations

import hashlib
import json
import marshal
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

from dra_driver.cli.validation.machine_fit import MachineFit
from dra_driver.cli.validation.rules.allocator import AllocationError
from dra_driver.cli.validation.rules.manifests import bodies, class_names, requests_of
from dra_driver.cli.validation.rules.selection import NotJudgedError
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import allocation_results
from dra_driver.model.schema import JsonObject

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
    """The claims that ask for devices of a DRA driver, or of a class that is missing, and have none. All in v1 shape;
    `pools` are whole pools of slices by name, each of one node. A claim that is being deleted is not pending."""
    by_name = {entry["metadata"]["name"]: entry for entry in classes}
    ours = {name for name, entry in by_name.items() if driver in json.dumps(entry.get("spec") or {})}
    waiting = [claim for claim in claims if _waits(claim) and _is_in(claim, namespace)]
    asking: dict[str, list[JsonObject]] = {}  # pods of one template have claims with one spec
    for claim in waiting:
        known = {name for name in class_names(claim["spec"]) if name in ours or name not in by_name}
        if known or _strange(claim, {}) is not None:
            asking.setdefault(json.dumps(claim["spec"], sort_keys=True), []).append(claim)
    judged = [same[0] for same in asking.values()][:_MOST_SPECS]
    cluster = _Cluster(driver, claims, pools, by_name, ours)
    verdicts = dict(zip(asking, map(cluster.verdict, judged), strict=False))
    found = []
    for claim in waiting:
        key = json.dumps(claim["spec"], sort_keys=True)
        if key not in asking:
            continue
        metadata = claim["metadata"]
        found.append(
            replace(
                verdicts.get(key, _TOO_MANY),
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


@dataclass(eq=False)
class _Cluster:
    """All nodes, put into kinds for each set of attributes that selectors name."""

    driver: str
    claims: Sequence[JsonObject]
    pools: Mapping[str, Sequence[JsonObject]]
    classes: Mapping[str, JsonObject]
    ours: Collection[str]

    def __post_init__(self) -> None:
        self._kinds: dict[frozenset[str], tuple[list[_Kind], int]] = {}
        self._holding: dict[str, list[JsonObject]] = {}
        for claim in self.claims:
            for pool in {result["pool"] for result in _results(claim, self.driver)}:
                self._holding.setdefault(pool, []).append(claim)

    def verdict(self, claim: JsonObject) -> PendingClaim:
        strange = _strange(claim, self.classes)
        if strange is not None:
            return PendingClaim("", "", unknown=f"{strange} has a form that this version does not know")
        names = set(class_names(claim["spec"]))
        missing = sorted(names - set(self.classes))
        if missing:
            return PendingClaim("", "", reasons=((f"there is no DeviceClass {missing[0]}", len(self.pools)),))
        foreign = sorted(names - set(self.ours))
        if foreign:
            return PendingClaim("", "", unknown=f"class {foreign[0]} is of another driver")
        try:
            kinds, untried = self._kinds_for(_named(claim, self.classes))
            return self._tried(claim["spec"], kinds, untried)
        except (DraDriverError, AllocationError, NotJudgedError) as error:  # it must not hide the others
            return PendingClaim("", "", unknown=str(error))

    def _tried(self, spec: JsonObject, kinds: Iterable[_Kind], untried: int) -> PendingClaim:
        reasons: Counter[str] = Counter()
        best: dict[str, tuple[int, int, str]] = {}
        fits: list[str] = []
        for kind in kinds:
            alone = kind.machine.claim(spec, self.classes)
            if alone.problem is not None:
                reasons[alone.problem] += len(kind.nodes)
            elif kind.others and kind.machine.claim(spec, self.classes, kind.others).problem is not None:
                reason, free, matching = kind.machine.taken_away(alone, kind.others)
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
        """Those that are tried, and how many nodes are of others."""
        if named not in self._kinds:
            alike: dict[bytes, list[str]] = {}
            for pool, slices in self.pools.items():
                alike.setdefault(_look(slices, self._taken(pool), named), []).append(pool)
            common = sorted(alike.values(), key=len, reverse=True)
            sizes = accumulate(len(_devices(self.pools[pools[0]])) for pools in common)
            tried = max(1, sum(size <= _MOST_DEVICES for size in islice(sizes, _MOST_KINDS)))
            kinds = [self._kind(pools) for pools in common[:tried]]
            self._kinds[named] = kinds, sum(map(len, common[tried:]))
        return self._kinds[named]

    def _taken(self, pool: str) -> list[JsonObject]:
        return [
            result
            for claim in self._holding.get(pool, ())
            for result in _results(claim, self.driver)
            if result["pool"] == pool and not result.get("adminAccess")
        ]

    def _kind(self, pools: Sequence[str]) -> _Kind:
        first = pools[0]
        nodes = tuple(str(self.pools[pool][0]["spec"]["nodeName"]) for pool in pools)
        machine = MachineFit(nodes[0], self.driver, self.pools[first])
        return _Kind(machine, self._holding.get(first, ()), nodes)


def _devices(slices: Sequence[JsonObject]) -> list[JsonObject]:
    return [device for entry in slices for device in entry["spec"].get("devices") or ()]


def _results(claim: JsonObject, driver: str) -> list[JsonObject]:
    return [result for result in allocation_results(claim) if result.get("driver") == driver]


def _waits(claim: JsonObject) -> bool:
    allocation = (claim.get("status") or {}).get("allocation")
    return not allocation and not claim["metadata"].get("deletionTimestamp")


def _is_in(claim: JsonObject, namespace: str | None) -> bool:
    return namespace is None or claim["metadata"].get("namespace") == namespace


def _strange(claim: JsonObject, classes: Mapping[str, JsonObject]) -> str | None:
    """The first request or class that this version does not know, or of which it does not know a selector; None if it
    knows all."""
    for request in requests_of(claim["spec"]):
        asked = bodies(request)
        if not asked or not all(map(_known_selectors, asked)):
            return f"request {request.get('name')}"
    named = ((name, classes.get(name)) for name in class_names(claim["spec"]))
    return next((f"class {name}" for name, one in named if one and not _known_selectors(one["spec"])), None)


def _known_selectors(body: JsonObject) -> bool:
    return all((one.get("cel") or {}).get("expression") is not None for one in body.get("selectors") or ())


def _named(claim: JsonObject, classes: Mapping[str, JsonObject]) -> frozenset[str]:
    """The attributes of which a selector may want a certain value."""
    asking = [one for request in requests_of(claim["spec"]) for one in bodies(request)]
    asking += [classes[name].get("spec") or {} for name in class_names(claim["spec"])]
    text = "\n".join(
        selector["cel"]["expression"] for body in asking for selector in body.get("selectors") or ()
    )
    return frozenset(name for name in _OWN | _RELATED if re.search(rf"\b{name}\b(?!\()", text))


def _look(slices: Sequence[JsonObject], taken: Iterable[JsonObject], named: frozenset[str]) -> bytes:
    """A digest of what a node has and what is taken of it, without what makes it this node, in any order of its GPUs.
    The values of `named` attributes count."""
    held: dict[str, list[str]] = {}
    for result in taken:
        held.setdefault(result["device"], []).append(repr(result.get("consumedCapacity") or {}))
    devices = _devices(slices)
    own, related = _OWN - named, _RELATED - named
    often = Counter(
        (name, repr(value))
        for device in devices
        for name, value in (device.get("attributes") or {}).items()
        if _short(name) in related
    )
    numbers = {value: number for number, value in enumerate(value for value in often if often[value] > 1)}
    counters = {
        entry["name"]: _bytes(entry["counters"])
        for content in slices
        for entry in content["spec"].get("sharedCounters") or ()
    }
    gpus: dict[str, list[bytes]] = {}
    for device in devices:
        attributes = [
            (name, numbers.get((name, repr(value))) if _short(name) in related else value)
            for name, value in (device.get("attributes") or {}).items()
            if _short(name) not in own
        ]
        taints = [(taint["key"], taint.get("value"), taint["effect"]) for taint in device.get("taints") or ()]
        consumed = device.get("consumesCounters") or ()
        sets = sorted(entry["counterSet"] for entry in consumed)
        content = (
            attributes, device.get("capacity"), taints, [entry["counters"] for entry in consumed],
            device.get("allowMultipleAllocations"), sorted(held.get(device["name"], ())),
        )  # fmt: skip
        gpu = " ".join(sets) or f"device {device['name']}"
        gpus.setdefault(gpu, [counters.get(name, b"") for name in sets]).append(_bytes(content))
    return hashlib.blake2b(_bytes(sorted(map(_bytes, gpus.values()))), digest_size=16).digest()


def _bytes(content: Any) -> bytes:
    """The same for equal values of the shape of JSON. Version 2 writes no references, which depend on more than the
    values."""
    return marshal.dumps(content, 2)


@lru_cache(maxsize=4096)
def _short(name: str) -> str:
    return name.rpartition("/")[2]
