"""What a whole cluster has and who uses it, from its ResourceSlices and ResourceClaims alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from fractions import Fraction
from operator import add
from typing import Literal

from dra_driver.cli.rules.cluster_usage import Used, used_together
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import allocation_results
from dra_driver.model.gpu import GpuLoad
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import format_bytes, format_decimal, parse_quantity

State = Literal["free", "allocated", "blocked", "tainted"]
Slot = tuple[str, str]
"""Pool and device name."""

_BYTES = 1 << 20
"""Amounts below are numbers of things, not bytes."""
ALL_NODES = "(all nodes)"
SOME_NODES = "(some nodes)"
"""Where a device is that no single node has: several can use it, by a network or a switch."""
_BUS_ID = "resource.kubernetes.io/pciBusID"
_KEEP_AWAY = frozenset({"NoSchedule", "NoExecute"})
_REPLICA_SET = re.compile(r"-[a-z0-9]{6,10}\Z")


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim that has a device, or a share of it. `consumed` are its capacities by name, empty for a whole device."""

    namespace: str
    claim: str
    uid: str
    pods: tuple[str, ...]
    consumed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """A device of ours; of a card that containers or a virtual machine may get, the one that there is now. `node` is
    ALL_NODES or SOME_NODES where several can use it. `state` is of the whole device: `blocked` if what other devices
    take of the same GPU leaves too little for it. A device that is shared is allocated from its first holder on.
    `capacity` is of shared devices only."""

    node: str
    pool: str
    name: str
    kind: str
    product: str
    profile: str | None
    is_shared: bool
    state: State
    taints: tuple[str, ...]
    holders: tuple[Holder, ...]
    capacity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Count:
    """GPUs and MIG devices of a node or a product. A GPU that is neither free, allocated nor blocked has a taint that
    keeps new pods away; `tainted` are all with such a taint, also those that are allocated or blocked."""

    gpus: int = 0
    free: int = 0
    allocated: int = 0
    blocked: int = 0
    tainted: int = 0
    mig: int = 0
    mig_allocated: int = 0
    shares: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node with its products, the taints of its GPUs, what is consumed of the capacities of shared devices and how
    much there is, and why its pool is not whole, None if it is."""

    node: str
    products: tuple[str, ...]
    count: Count
    problem: str | None = None
    taints: tuple[str, ...] = ()
    consumed: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProductRow:
    """How much there is of a product, and how many nodes have some of it."""

    product: str
    nodes: int
    count: Count


@dataclass(frozen=True, slots=True)
class UserRow:
    """What a namespace, a workload, a pod or a claim has: whole GPUs, MIG devices by profile, shares, what the shares
    consume, and how it is used, None if nobody asked for that."""

    namespace: str
    name: str
    claims: int
    gpus: int
    mig: Mapping[str, int]
    shares: int
    nodes: tuple[str, ...]
    consumed: Mapping[str, str] = field(default_factory=dict)
    used: Used | None = None


def pools_of(driver: str, slices: Iterable[JsonObject]) -> tuple[dict[str, list[JsonObject]], dict[str, str]]:
    """The slices of each pool's newest generation, and why a pool is not whole."""
    newest: dict[str, int] = {}
    members: dict[str, list[JsonObject]] = {}
    for entry in slices:
        spec = entry["spec"]
        if spec.get("driver") != driver:
            continue
        pool, generation = spec["pool"]["name"], spec["pool"].get("generation", 0)
        if pool not in newest or generation > newest[pool]:
            newest[pool], members[pool] = generation, []
        if generation == newest[pool]:
            members[pool].append(entry)
    problems = {
        pool: f"{len(found)} of {found[0]['spec']['pool']['resourceSliceCount']} slices are there"
        for pool, found in members.items()
        if len(found) != found[0]["spec"]["pool"].get("resourceSliceCount", len(found))
    }
    return members, problems


def place_of(spec: JsonObject, device: JsonObject | None = None) -> str:
    """The node of a slice, or of a device in one that leaves it to each device; ALL_NODES or SOME_NODES if that is not
    one node."""
    said = device if spec.get("perDeviceNodeSelection") and device is not None else spec
    if said.get("nodeName"):
        return str(said["nodeName"])
    return ALL_NODES if said.get("allNodes") else SOME_NODES


def node_of(slices: Sequence[JsonObject]) -> str | None:
    """The node whose pool it is; None for a pool that nodes share."""
    places = {place_of(entry["spec"]) for entry in slices}
    only = places.pop() if len(places) == 1 else ALL_NODES
    return None if only in (ALL_NODES, SOME_NODES) else only


def holders_of(driver: str, claims: Iterable[JsonObject]) -> dict[Slot, list[Holder]]:
    """Who has each device; admin access takes nothing from others and is left out."""
    found: dict[Slot, list[Holder]] = {}
    for claim in claims:
        for result in allocation_results(claim):
            if result.get("driver") == driver and not result.get("adminAccess"):
                found.setdefault((result["pool"], result["device"]), []).append(_holder(claim, result))
    return found


def _holder(claim: JsonObject, result: JsonObject) -> Holder:
    metadata = claim["metadata"]
    pods = tuple(
        entry["name"]
        for entry in (claim.get("status") or {}).get("reservedFor") or ()
        if entry.get("resource") == "pods"
    )
    consumed = {name: str(value) for name, value in (result.get("consumedCapacity") or {}).items()}
    return Holder(metadata.get("namespace", ""), metadata["name"], metadata.get("uid", ""), pods, consumed)


def devices_of(
    members: Mapping[str, Sequence[JsonObject]], holders: Mapping[Slot, Sequence[Holder]]
) -> list[ClusterDevice]:
    """Every GPU and MIG device of the pools that there is, with its state."""
    return [device for pool, slices in members.items() for device in _pool_devices(pool, slices, holders)]


def _pool_devices(
    pool: str, slices: Sequence[JsonObject], holders: Mapping[Slot, Sequence[Holder]]
) -> Iterator[ClusterDevice]:
    left = _counters(slices)
    entries = [(entry["spec"], device) for entry in slices for device in entry["spec"].get("devices") or ()]
    for _, device in entries:
        # However many claims share a device, what it takes of its GPU is taken once.
        if holders.get((pool, device["name"])):
            for key, amount in _consumption(device):
                left[key] = left.get(key, 0) - amount
    other_views = _other_views(pool, entries, holders)
    for spec, device in entries:
        attributes: JsonObject = device.get("attributes") or {}
        found = tuple(holders.get((pool, device["name"]), ()))
        if not found and (device["name"] in other_views or is_on_demand(device, spec["driver"])):
            continue
        kind = _text(attributes, "type", spec["driver"]) or "gpu"
        taints = tuple(
            f"{taint['key'].rpartition('/')[2]}:{taint['effect']}" for taint in device.get("taints") or ()
        )
        state: State = "free"
        if found:
            state = "allocated"
        elif any(left.get(key, 0) < amount for key, amount in _consumption(device)):
            state = "blocked"
        elif _keeps_away(taints):
            state = "tainted"
        yield ClusterDevice(
            node=place_of(spec, device),
            pool=pool,
            name=device["name"],
            kind=kind,
            product=_text(attributes, "productName", spec["driver"]) or "-",
            profile=_text(attributes, "profile", spec["driver"]),
            is_shared=bool(device.get("allowMultipleAllocations")),
            state=state,
            taints=taints,
            holders=found,
            capacity={name: str(entry["value"]) for name, entry in (device.get("capacity") or {}).items()}
            if device.get("allowMultipleAllocations")
            else {},
        )


def _other_views(
    pool: str,
    entries: Iterable[tuple[JsonObject, JsonObject]],
    holders: Mapping[Slot, Sequence[Holder]],
) -> set[str]:
    """Names of devices for containers whose card a virtual machine has, and of devices for virtual machines whose card
    containers may get: a card counts once."""
    cards: dict[str, dict[bool, list[str]]] = {}
    for spec, device in entries:
        attributes = device.get("attributes") or {}
        bus_id = _text(attributes, _BUS_ID, spec["driver"])
        if bus_id is not None:
            is_vfio = _text(attributes, "type", spec["driver"]) == "vfio"
            cards.setdefault(bus_id, {True: [], False: []})[is_vfio].append(device["name"])
    found: set[str] = set()
    for views in cards.values():
        has_machine = any(holders.get((pool, name)) for name in views[True])
        if views[False]:
            found.update(views[not has_machine])
    return found


def _keeps_away(taints: Iterable[str]) -> bool:
    """Whether one of these taints, such as `xid:NoSchedule`, keeps new pods off a device."""
    return any(taint.rpartition(":")[2] in _KEEP_AWAY for taint in taints)


def is_on_demand(device: JsonObject, driver: str) -> bool:
    """Whether it is a MIG device that is made when a claim gets it; there are dozens a GPU."""
    attributes: JsonObject = device.get("attributes") or {}
    return _text(attributes, "type", driver) == "mig" and _text(attributes, "uuid", driver) is None


def _counters(slices: Sequence[JsonObject]) -> dict[tuple[str, str], Fraction]:
    return {
        (entry["name"], name): amount_of(str(value["value"]))
        for content in slices
        for entry in content["spec"].get("sharedCounters") or ()
        for name, value in entry["counters"].items()
    }


def _consumption(device: JsonObject) -> Iterator[tuple[tuple[str, str], Fraction]]:
    for entry in device.get("consumesCounters") or ():
        for name, value in entry["counters"].items():
            yield (entry["counterSet"], name), amount_of(str(value["value"]))


def amount_of(quantity: str) -> Fraction:
    """A quantity as a number; what is none counts as 0."""
    try:
        return parse_quantity(quantity)
    except InvalidConfigError:
        return Fraction(0)


def _text(attributes: JsonObject, name: str, driver: str) -> str | None:
    """A driver may write its own domain or leave it out."""
    value = attributes.get(name) or attributes.get(f"{driver}/{name}")
    return None if not value else str(next(iter(value.values())))


def count(devices: Iterable[ClusterDevice]) -> Count:
    """How many there are of each kind, in each state."""
    found = [*devices]
    gpus = [device for device in found if device.kind != "mig"]
    mig = [device for device in found if device.kind == "mig"]
    states = Counter(device.state for device in gpus)
    return Count(
        gpus=len(gpus),
        free=states["free"],
        allocated=states["allocated"],
        blocked=states["blocked"],
        tainted=sum(_keeps_away(device.taints) for device in gpus),
        mig=len(mig),
        mig_allocated=sum(bool(device.holders) for device in mig),
        shares=sum(len(device.holders) for device in found if device.is_shared),
    )


def by_node(
    devices: Iterable[ClusterDevice], members: Mapping[str, Sequence[JsonObject]], problems: Mapping[str, str]
) -> list[NodeRow]:
    """A row a node, also for one that publishes an empty pool, and one for what all or some nodes can use."""
    found: dict[str, list[ClusterDevice]] = {}
    places: dict[str, set[str]] = {pool: set() for pool in members}
    for device in devices:
        found.setdefault(device.node, []).append(device)
        places[device.pool].add(device.node)
    bad: dict[str, str] = {}
    for pool, slices in members.items():
        places[pool] |= {str(entry["spec"]["nodeName"]) for entry in slices if entry["spec"].get("nodeName")}
        for place in places[pool] or {place_of(slices[0]["spec"])}:
            found.setdefault(place, [])
            if pool in problems:
                problem = problems[pool] if node_of(slices) else f"pool {pool}: {problems[pool]}"
                bad[place] = f"{bad[place]}; {problem}" if place in bad else problem
    return [
        NodeRow(
            node,
            tuple(dict.fromkeys(one.product for one in mine)),
            count(mine),
            bad.get(node),
            tuple(dict.fromkeys(taint for one in mine for taint in one.taints)),
            _consumed_of(mine),
        )
        for node, mine in sorted(found.items())
    ]


def _consumed_of(devices: Iterable[ClusterDevice]) -> dict[str, tuple[str, str]]:
    shared = [device for device in devices if device.is_shared]
    there = _sums(device.capacity for device in shared)
    taken = _sums(holder.consumed for device in shared for holder in device.holders)
    return {
        name: (_written(taken.get(name, Fraction(0))), _written(amount))
        for name, amount in sorted(there.items())
    }


def _sums(amounts: Iterable[Mapping[str, str]]) -> dict[str, Fraction]:
    """By the last part of the capacity's name: a driver may write its own domain or leave it out."""
    found: dict[str, Fraction] = {}
    for one in amounts:
        for name, quantity in one.items():
            short = name.rpartition("/")[2]
            found[short] = found.get(short, Fraction(0)) + amount_of(quantity)
    return found


def _written(amount: Fraction) -> str:
    return format_bytes(amount) if amount >= _BYTES else format_decimal(amount)


def by_product(devices: Iterable[ClusterDevice]) -> list[ProductRow]:
    """A row a product."""
    found: dict[str, list[ClusterDevice]] = {}
    for device in devices:
        found.setdefault(device.product, []).append(device)
    return [
        ProductRow(product, len({one.node for one in mine} - {ALL_NODES, SOME_NODES}), count(mine))
        for product, mine in sorted(found.items())
    ]


def by_user(
    devices: Iterable[ClusterDevice],
    what: Literal["namespace", "workload", "pod", "claim"],
    workloads: Mapping[tuple[str, str], str],
    loads: Mapping[Slot, GpuLoad] | None = None,
) -> list[UserRow]:
    """Who has how much, the greatest first; with `loads` who wastes how much. `workloads` has the workload of each pod,
    by namespace and name. What several pods or workloads share counts for each of them."""
    found: dict[tuple[str, str], list[tuple[ClusterDevice, Holder]]] = {}
    for device in devices:
        for holder in device.holders:
            for name in dict.fromkeys(_names(holder, what, workloads)):
                found.setdefault((holder.namespace, name), []).append((device, holder))
    rows = [_user(key, held, loads) for key, held in found.items()]
    return sorted(
        rows,
        key=lambda row: (
            -(row.used.wasted_bytes if row.used else 0),
            -row.gpus,
            -sum(row.mig.values()),
            -row.shares,
            row.namespace,
            row.name,
        ),
    )


def _names(holder: Holder, what: str, workloads: Mapping[tuple[str, str], str]) -> Iterator[str]:
    if what == "namespace":
        yield ""
    elif what == "claim":
        yield holder.claim
    elif not holder.pods:
        yield f"(claim {holder.claim})"
    elif what == "pod":
        yield from holder.pods
    else:
        for pod in holder.pods:
            yield workloads.get((holder.namespace, pod), f"Pod/{pod}")


def _user(
    key: tuple[str, str], held: Sequence[tuple[ClusterDevice, Holder]], loads: Mapping[Slot, GpuLoad] | None
) -> UserRow:
    whole = {(one.pool, one.name): one for one, _ in held if not one.is_shared}
    mig = Counter(one.profile or "-" for one in whole.values() if one.kind == "mig")
    shares = {(one.pool, one.name, holder.uid) for one, holder in held if one.is_shared}
    consumed = _sums(holder.consumed for one, holder in held if one.is_shared)
    used: Used | None = None
    if loads is not None:
        mine = {(one.pool, one.name, holder.uid) for one, holder in held}
        devices = {(one.pool, one.name): one for one, _ in held}
        is_shared = any(
            (*slot, holder.uid) not in mine for slot, one in devices.items() for holder in one.holders
        )
        used = used_together(map(loads.get, devices), is_shared=is_shared)
    return UserRow(
        namespace=key[0],
        name=key[1],
        claims=len({holder.uid for _, holder in held}),
        gpus=sum(one.kind != "mig" for one in whole.values()),
        mig=dict(sorted(mig.items())),
        shares=len(shares),
        nodes=tuple(sorted({one.node for one, _ in held})),
        consumed={name: _written(amount) for name, amount in sorted(consumed.items()) if amount},
        used=used,
    )


def workload_of(metadata: JsonObject) -> str:
    """`Deployment/web` for a pod that a ReplicaSet of it controls, `Job/train`, or `Pod/NAME` without a controller."""
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            kind, name = str(owner["kind"]), str(owner["name"])
            if kind == "ReplicaSet" and _REPLICA_SET.search(name):
                return f"Deployment/{_REPLICA_SET.sub('', name)}"
            return f"{kind}/{name}"
    return f"Pod/{metadata['name']}"
