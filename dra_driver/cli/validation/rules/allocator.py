"""Which devices a claim gets, decided as kube-scheduler does for one node. No I/O; stored (v1) form throughout.

Supported: `exactly` and `firstAvailable`, counts and `All`, class and request selectors, `matchAttribute` and
`distinctAttribute`, admin access, taints and tolerations, shared counters, consumable capacity. Anything else
is refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from typing import Any

from dra_driver.cli.validation.rules.cel import DeviceView, SelectorError, view
from dra_driver.cli.validation.rules.consumable import Amounts, consumption, fits, shareable, shares_of
from dra_driver.cli.validation.rules.manifests import alternatives
from dra_driver.cli.validation.rules.selectors import Selector, compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import allocation_results
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import parse_quantity

DeviceId = tuple[str, str, str]  # driver, pool, device
CounterId = tuple[str, str, str, str]  # driver, pool, counter set, counter

_MOST_RESULTS = 32


class AllocationError(Exception):
    """The claim cannot be allocated: nothing fits, or it asks for what this scheduler does not support."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A device of a complete pool on the node."""

    id: DeviceId
    device: Mapping[str, Any]
    view: DeviceView
    _verdicts: dict[Selector, bool] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Of the device in its pool."""
        return self.id[2]

    def matches(self, selector: Selector) -> bool:
        """Whether a selector chooses it, asked once. Raises: SelectorError."""
        if selector not in self._verdicts:
            self._verdicts[selector] = selector.matches(self.view)
        return self._verdicts[selector]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One (sub)request with everything that decides about a device."""

    name: str
    class_name: str
    class_selectors: tuple[Selector, ...] = ()
    selectors: tuple[Selector, ...] = ()
    count: int | None = 1  # None is allocationMode All
    admin: bool = False
    tolerations: Sequence[Mapping[str, Any]] = ()
    capacity: Mapping[str, Any] = field(default_factory=dict)

    def untolerated(self, candidate: Candidate) -> Mapping[str, Any] | None:
        """A taint of the device that keeps this request off, also with adminAccess; None if there is none."""
        taints = candidate.device.get("taints") or ()
        return next((taint for taint in taints if not _tolerated(taint, self.tolerations)), None)


@dataclass(frozen=True, slots=True)
class Pick:
    """One device for one request."""

    wanted: Wanted
    candidate: Candidate

    @property
    def is_share(self) -> bool:
        """Whether this is one of several allocations of the device."""
        return shareable(self.candidate.device) and not self.wanted.admin

    def consumes(self) -> Amounts:
        """What it takes of the device's capacities."""
        return consumption(self.wanted.capacity, self.candidate.device) or {}


@dataclass(slots=True)
class FreeDevices:
    """What a node has left: candidates in the scheduler's order, without what is taken whole or in shares, and what the
    counters still hold."""

    candidates: list[Candidate]
    taken: set[DeviceId]
    shares: dict[DeviceId, list[Amounts]] = field(default_factory=dict)
    counters: dict[CounterId, Fraction] = field(default_factory=dict)


def allocate(
    free: FreeDevices, claim: JsonObject, classes: Mapping[str, JsonObject], node: str
) -> JsonObject:
    """The `status.allocation` for `claim`, from what a node has left.

    Raises: AllocationError; InvalidConfigError, NotJudgedError for a selector.
    """
    devices = (claim.get("spec") or {}).get("devices") or {}
    variants = all_wanted(devices, classes)
    constraints = list(devices.get("constraints") or ())
    for constraint in constraints:
        if not (constraint.get("matchAttribute") or constraint.get("distinctAttribute")):
            raise AllocationError(f"constraint {sorted(constraint)} is not supported by this scheduler")
    search = _Search(free, constraints)
    picks = next(search.all_of(variants, []), None)
    if picks is None:
        names = ", ".join(request["name"] for request in devices.get("requests") or ())
        raise AllocationError(f"cannot allocate all claims: no devices on node {node} fit requests {names}")
    if len(picks) > _MOST_RESULTS:
        raise AllocationError(
            f"the claim would get {len(picks)} devices, at most {_MOST_RESULTS} are allowed"
        )
    return _allocation(claim, picks, classes, node)


def free_devices(slices: Sequence[JsonObject], claims: Iterable[JsonObject], node: str) -> FreeDevices:
    """Devices and counters of the node's complete pools, less what other claims hold."""
    candidates: list[Candidate] = []
    counters: dict[CounterId, Fraction] = {}
    for (driver, pool), members in _complete_pools(slices, node):
        for member in members:
            for device in member["spec"].get("devices") or ():
                candidates.append(Candidate((driver, pool, device["name"]), device, view(driver, device)))
            for counter_set in member["spec"].get("sharedCounters") or ():
                for name, counter in counter_set["counters"].items():
                    counters[driver, pool, counter_set["name"], name] = _amount(counter["value"])
    return less(FreeDevices(candidates, set(), {}, counters), claims)


def less(empty: FreeDevices, claims: Iterable[JsonObject]) -> FreeDevices:
    """What is left where no claim has anything of."""
    taken: set[DeviceId] = set()
    shares: dict[DeviceId, list[Amounts]] = {}
    for claim in claims:
        taken.update(_held(claim))
        for device_id, amounts in shares_of(claim):
            shares.setdefault(device_id, []).append(amounts)
    counters = dict(empty.counters)
    for candidate in empty.candidates:
        if candidate.id in taken or candidate.id in shares:
            for key, amount in counters_of(candidate).items():
                counters[key] = counters.get(key, Fraction(0)) - amount
    return FreeDevices(empty.candidates, taken, shares, counters)


def counters_of(candidate: Candidate) -> dict[CounterId, Fraction]:
    """What allocating the device takes from the pool's counters."""
    driver, pool, _ = candidate.id
    return {
        (driver, pool, entry["counterSet"], name): _amount(counter["value"])
        for entry in candidate.device.get("consumesCounters") or ()
        for name, counter in entry["counters"].items()
    }


class _Search:
    """Depth-first over requests, their variants and devices; the first complete choice is taken."""

    def __init__(self, free: FreeDevices, constraints: Sequence[Mapping[str, Any]]) -> None:
        self._left = free
        self._constraints = constraints
        self._matching: dict[str, list[Candidate]] = {}

    def all_of(self, variants: list[list[Wanted]], picks: list[Pick]) -> Iterator[list[Pick]]:
        """Every way to serve the remaining requests after `picks`."""
        if not variants:
            yield picks
            return
        for wanted in variants[0]:
            for chosen in self._one_of(wanted, picks):
                yield from self.all_of(variants[1:], chosen)

    def _one_of(self, wanted: Wanted, picks: list[Pick]) -> Iterator[list[Pick]]:
        if wanted.name not in self._matching:
            self._matching[wanted.name] = [c for c in self._left.candidates if _matches(wanted, c)]
        matching = self._matching[wanted.name]
        if wanted.count is None:
            chosen = picks + [Pick(wanted, candidate) for candidate in matching]
            steps = (chosen[: i + 1] for i in range(len(picks), len(chosen)))
            if matching and all(self._free(step[:-1], step[-1]) for step in steps):
                yield chosen
            return
        yield from self._choose(wanted, matching, wanted.count, picks)

    def _choose(
        self, wanted: Wanted, matching: list[Candidate], count: int, picks: list[Pick]
    ) -> Iterator[list[Pick]]:
        if count == 0:
            yield picks
            return
        for index, candidate in enumerate(matching):
            pick = Pick(wanted, candidate)
            if self._free(picks, pick):
                left = matching[index if pick.is_share else index + 1 :]
                yield from self._choose(wanted, left, count - 1, [*picks, pick])

    def _free(self, picks: list[Pick], pick: Pick) -> bool:
        # One device with such a taint is too many for `All`.
        if pick.wanted.untolerated(pick.candidate) is not None:
            return False
        if not all(_holds(constraint, [*picks, pick]) for constraint in self._constraints):
            return False
        own = pick.candidate.id
        # Counters have no exception for adminAccess: kube-scheduler counts them, kubernetes/kubernetes#140729.
        counted = {other.candidate.id: other.candidate for other in [*picks, pick]}
        if pick.wanted.admin:
            return self._counters_suffice([*counted.values()])
        held = {other.candidate.id for other in picks if not other.wanted.admin}
        if own in self._left.taken:
            return False
        shares = self._left.shares.get(own, [])
        if not pick.is_share and (own in held or shares):
            return False
        if pick.is_share:
            chosen = [other.consumes() for other in picks if other.is_share and other.candidate.id == own]
            if not fits(pick.candidate.device, [*shares, *chosen, pick.consumes()]):
                return False
        return self._counters_suffice([*counted.values()])

    def _counters_suffice(self, held: list[Candidate]) -> bool:
        left = dict(self._left.counters)
        for candidate in held:
            if candidate.id in self._left.shares:
                continue  # another claim's share has taken them already
            for key, amount in counters_of(candidate).items():
                left[key] = left.get(key, Fraction(0)) - amount
                if left[key] < 0:
                    return False
        return True


def _complete_pools(
    slices: Sequence[JsonObject], node: str
) -> Iterator[tuple[tuple[str, str], list[JsonObject]]]:
    """Pools whose slices of the highest generation are all there, in the scheduler's order."""

    def key(item: JsonObject) -> tuple[str, str]:
        return item["spec"]["driver"], item["spec"]["pool"]["name"]

    ordered = sorted(slices, key=lambda item: (*key(item), item["metadata"]["name"]))
    for pool, group in groupby(ordered, key):
        members = list(group)
        newest = max(m["spec"]["pool"].get("generation", 0) for m in members)
        members = [m for m in members if m["spec"]["pool"].get("generation", 0) == newest]
        if not any(_on_node(member["spec"], node, pool) for member in members):
            continue
        if len(members) == members[0]["spec"]["pool"]["resourceSliceCount"]:
            yield pool, members


def _on_node(spec: JsonObject, node: str, pool: tuple[str, str]) -> bool:
    if "nodeSelector" in spec or "perDeviceNodeSelection" in spec:
        raise AllocationError(
            f"pool {'/'.join(pool)} selects nodes in a way that this scheduler does not support"
        )
    return bool(spec.get("allNodes")) or spec.get("nodeName") == node


def _held(claim: JsonObject) -> Iterator[DeviceId]:
    for result in allocation_results(claim):
        if not result.get("adminAccess") and not result.get("shareID"):
            yield result["driver"], result["pool"], result["device"]


def all_wanted(devices: JsonObject, classes: Mapping[str, JsonObject]) -> list[list[Wanted]]:
    """The alternatives of each request of a claim, in order of preference. `devices` is `spec.devices` of a claim.

    Raises: AllocationError, InvalidConfigError, NotJudgedError.
    """
    return [
        [_wanted(name, body, classes) for name, body in alternatives(request)]
        for request in devices.get("requests") or ()
    ]


def _wanted(name: str, body: JsonObject, classes: Mapping[str, JsonObject]) -> Wanted:
    class_name = body["deviceClassName"]
    if class_name not in classes:
        raise AllocationError(f"request {name}: device class {class_name} does not exist")
    return Wanted(
        name,
        class_name,
        _selectors(classes[class_name].get("spec") or {}),
        _selectors(body),
        None if body.get("allocationMode") == "All" else body.get("count", 1),
        bool(body.get("adminAccess")),
        body.get("tolerations") or (),
        (body.get("capacity") or {}).get("requests") or {},
    )


def _selectors(body: JsonObject) -> tuple[Selector, ...]:
    return tuple(compiled(entry["cel"]["expression"]) for entry in body.get("selectors") or ())


def _matches(wanted: Wanted, candidate: Candidate) -> bool:
    try:
        if not all(candidate.matches(one) for one in (*wanted.class_selectors, *wanted.selectors)):
            return False
    except SelectorError as error:
        raise AllocationError(f"request {wanted.name}, device {'/'.join(candidate.id)}: {error}") from error
    return consumption(wanted.capacity, candidate.device) is not None


def _tolerated(taint: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    if taint.get("effect") == "None":
        return True
    return any(
        toleration.get("effect") in (None, "", taint.get("effect"))
        and toleration.get("key") in (None, "", taint.get("key"))
        and (
            toleration.get("operator") == "Exists"
            or (toleration.get("value") or "") == (taint.get("value") or "")
        )
        for toleration in tolerations
    )


def _holds(constraint: Mapping[str, Any], picks: list[Pick]) -> bool:
    """Whether the picks so far keep a constraint of the claim."""
    names = constraint.get("requests") or ()
    name = constraint.get("matchAttribute") or constraint["distinctAttribute"]
    domain, _, identifier = name.rpartition("/")
    values = []
    for pick in picks:
        if names and not {pick.wanted.name, pick.wanted.name.partition("/")[0]} & set(names):
            continue
        value = pick.candidate.view.attributes.get(domain, {}).get(identifier)
        if value is None:
            return False
        if isinstance(value, (list, dict)):
            raise AllocationError(
                f"attribute {name} of device {pick.candidate.id[2]} is of a sort that is not compared"
            )
        values.append((type(value), value))
    return len(set(values)) <= 1 if constraint.get("matchAttribute") else len(set(values)) == len(values)


def _allocation(
    claim: JsonObject, picks: list[Pick], classes: Mapping[str, JsonObject], node: str
) -> JsonObject:
    devices: JsonObject = {"results": [_result(pick) for pick in picks]}
    config = [*_class_config(picks, classes)]
    for entry in claim["spec"]["devices"].get("config") or ():
        config.append({"source": "FromClaim", **entry})
    if config:
        devices["config"] = config
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    return {"devices": devices, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]}}


def _result(pick: Pick) -> JsonObject:
    driver, pool, device = pick.candidate.id
    result: JsonObject = {"request": pick.wanted.name, "driver": driver, "pool": pool, "device": device}
    if pick.wanted.admin:
        result["adminAccess"] = True
    if pick.is_share:
        result["shareID"] = str(uuid.uuid4())
        result["consumedCapacity"] = dict(pick.consumes())
    if pick.wanted.tolerations:
        result["tolerations"] = [dict(toleration) for toleration in pick.wanted.tolerations]
    return result


def _class_config(picks: list[Pick], classes: Mapping[str, JsonObject]) -> Iterator[JsonObject]:
    """Class configuration of each request that was served, in request order."""
    for wanted in {pick.wanted.name: pick.wanted for pick in picks}.values():
        for entry in classes[wanted.class_name]["spec"].get("config") or ():
            yield {"source": "FromClass", "requests": [wanted.name], **entry}


def _amount(value: Any) -> Fraction:
    try:
        return parse_quantity(str(value))
    except InvalidConfigError as error:
        raise AllocationError(str(error)) from error
