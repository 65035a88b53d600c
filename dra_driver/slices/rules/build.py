"""The only builder of ResourceSlices: converts an inventory to the desired pool of this node.

A device that exceeds a limit must not cost the node its other devices. Source of the limits: validation of
resource.k8s.io/v1 as of Kubernetes 1.37.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from dra_driver.mig.rules.counters import consumed_counters, counter_set, has_counters, is_counted
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import is_dns_label
from dra_driver.model.inventory import Inventory, OfferedDevice, StaticMigDevice, VfioDevice, WholeGpu
from dra_driver.model.schema import JsonObject
from dra_driver.model.sharing import NO_SHARING, SharingPolicy
from dra_driver.model.units import named
from dra_driver.power.rules.limits import NO_POWER_POLICY, PowerPolicy
from dra_driver.sharing.rules.client_limits import BoundedRule, bounded_rule
from dra_driver.slices.rules.attributes import ENTRIES, MAX_ATTRIBUTES_AND_CAPACITIES, wire_device

_MAX_TAINTS_BEFORE = 4
MAX_DEVICES_PER_SLICE = 64
"""The API allows 128 plain devices, but only 64 if any has a taint, which may be added at any time."""
MAX_COUNTER_SETS_PER_SLICE = 8
MAX_COUNTERS_PER_SET = 32
MAX_TAINTS = 16
_POWER, _WATTS = "power", "watts"
T = TypeVar("T")


Taints = Callable[[OfferedDevice], Sequence[JsonObject]]


@dataclass(frozen=True, slots=True)
class TaintLimits:
    """The API server rejects the whole slice if a device exceeds these. `informational`: without an effect."""

    informational: bool = True
    most: int = MAX_TAINTS


NEWEST_TAINTS = TaintLimits()
"""For Kubernetes 1.35 and newer. The other limits in this module are those of the strictest Kubernetes release."""
OLDEST_TAINTS = TaintLimits(informational=False, most=_MAX_TAINTS_BEFORE)


def untainted(device: OfferedDevice) -> Sequence[JsonObject]:
    return ()


def none_withheld(device: OfferedDevice) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class SliceContent:
    """Devices or counter sets, never both (Kubernetes 1.35 and newer)."""

    devices: tuple[JsonObject, ...] = ()
    shared_counters: tuple[JsonObject, ...] = ()

    @property
    def entries(self) -> tuple[JsonObject, ...]:
        return self.devices + self.shared_counters


@dataclass(frozen=True, slots=True)
class Pool:
    """The desired slices in index order; at least one, to distinguish "no devices" from "no driver".

    `faults` describe the devices that the API server would reject, `notes` those with fewer shares than configured or
    with omitted attributes. `withheld` names devices that must not be used.
    """

    name: str
    slices: tuple[SliceContent, ...]
    faults: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    withheld: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class _Block:
    """Devices that must be in one slice, and the number of places reserved for them."""

    devices: tuple[JsonObject, ...]
    reserved: int


def build_pool(
    inventory: Inventory,
    node_name: str,
    sharing: SharingPolicy = NO_SHARING,
    taints: Taints = untainted,
    withheld: Callable[[OfferedDevice], bool] = none_withheld,
    *,
    compatibility_groups: bool = False,
    power: PowerPolicy = NO_POWER_POLICY,
) -> Pool:
    """Return the pool of a node: counter sets, then devices in PCI order, in slices within the API's limits.

    Devices for which `withheld` is True are omitted, and also, reported in `faults`, those that the API server would
    reject. With `compatibility_groups` the scheduler separates GPUs from MIG devices of the same counter set. With a
    budget in `power`, each GPU consumes its default limit from the counter set `power`.
    """
    faults: list[str] = []
    counters, refused = _counter_sets(inventory, faults)
    groups: dict[str, list[JsonObject]] = {gpu.uuid: [] for gpu in inventory.offered_gpus}
    held_back: list[str] = []
    notes: list[str] = []
    lacking: dict[tuple[str, ...], list[str]] = {}
    budget = _power_set(inventory, power)
    for offered in inventory.devices():
        bound = bounded_rule(sharing, offered, inventory.versions)
        if bound is not None and bound.note is not None:
            notes.append(bound.note)
        if offered.gpu.uuid in refused:
            continue
        if withheld(offered):
            held_back.append(offered.name)
            continue
        device, omitted = _without_excess(_entry(offered, inventory, bound, counters))
        if omitted:
            lacking.setdefault(omitted, []).append(offered.name)
        if compatibility_groups:
            for use in device.get("consumesCounters", ()):
                use["compatibilityGroups"] = [_group(offered)]
        if budget is not None and isinstance(offered, WholeGpu):
            consumed = power.counted_w(offered.gpu) or power.budget_w
            device["consumesCounters"] = [
                {"counterSet": _POWER, "counters": {_WATTS: {"value": str(consumed)}}}
            ]
        tainted = taints(offered)
        if tainted:
            device["taints"] = list(tainted)
        problems = device_faults(device)
        faults += problems
        if not problems:
            groups[offered.gpu.uuid].append(device)
    notes += [
        f"{named(devices)}: the slices omit {', '.join(omitted)}, because a device can have only "
        f"{MAX_ATTRIBUTES_AND_CAPACITIES} attributes and capacities"
        for omitted, devices in lacking.items()
    ]
    blocks = (
        block
        for gpu in inventory.offered_gpus
        for block in _blocks(gpu, groups[gpu.uuid], has_card=gpu.uuid in inventory.cards_by_gpu)
    )
    used = [entry for uuid, entry in counters.items() if groups[uuid]]
    if budget is not None and any(groups.values()):
        used.append(budget)
    slices = [SliceContent(shared_counters=chunk) for chunk in _chunks(used, MAX_COUNTER_SETS_PER_SLICE)]
    slices += [SliceContent(devices=chunk) for chunk in _device_chunks(blocks)]
    return Pool(node_name, tuple(slices) or (SliceContent(),), tuple(faults), tuple(notes), tuple(held_back))


def _counter_sets(inventory: Inventory, faults: list[str]) -> tuple[dict[str, JsonObject], set[str]]:
    sets: dict[str, JsonObject] = {}
    refused: set[str] = set()
    for gpu in inventory.offered_gpus:
        if not is_counted(gpu, inventory):
            continue
        entry = counter_set(inventory.gpu_names[gpu.uuid], gpu)
        problems = counter_set_faults(entry)
        if problems:
            faults += [f"{problem}, so the plugin publishes no device of this GPU" for problem in problems]
            refused.add(gpu.uuid)
        else:
            sets[gpu.uuid] = entry
    return sets, refused


def _power_set(inventory: Inventory, power: PowerPolicy) -> JsonObject | None:
    """Return the node's power budget, less the GPUs with static MIG devices, which always count."""
    if power.budget_w is None:
        return None
    divided = [power.counted_w(gpu) or power.budget_w for gpu in inventory.offered_gpus if gpu.mig_enabled]
    left = max(0, power.budget_w - sum(divided))
    return {"name": _POWER, "counters": {_WATTS: {"value": str(left)}}}


def _entry(
    offered: OfferedDevice,
    inventory: Inventory,
    bound: BoundedRule | None,
    counters: Mapping[str, JsonObject],
) -> JsonObject:
    device = wire_device(offered, inventory, bound)
    if offered.gpu.uuid in counters and not isinstance(offered, StaticMigDevice):
        device["consumesCounters"] = consumed_counters(offered, counters[offered.gpu.uuid])
    return device


def _without_excess(device: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the device within the API's limit, and the omitted names: capacities of 0 first, then the last of
    `ENTRIES`.
    """
    capacity = device.get("capacity", {})
    excess = len(device["attributes"]) + len(capacity) - MAX_ATTRIBUTES_AND_CAPACITIES
    if excess <= 0:
        return device, ()
    ranks = {one.name: -rank for rank, one in enumerate(ENTRIES)}
    names = sorted(
        (*device["attributes"], *capacity),
        key=lambda name: (name not in capacity or capacity[name]["value"] != "0", ranks[name]),
    )
    omitted = tuple(names[:excess])
    kept = {
        key: {name: value for name, value in device[key].items() if name not in omitted}
        for key in ("attributes", "capacity")
        if key in device
    }
    return device | kept, omitted


def _device_chunks(blocks: Iterable[_Block]) -> Iterator[tuple[JsonObject, ...]]:
    chunk: list[JsonObject] = []
    room = MAX_DEVICES_PER_SLICE
    for block in blocks:
        if block.reserved > room:
            if chunk:
                yield tuple(chunk)
            chunk, room = [], MAX_DEVICES_PER_SLICE
        chunk += block.devices
        room -= block.reserved
    if chunk:
        yield tuple(chunk)


def _group(device: OfferedDevice) -> str:
    return "vfio" if isinstance(device, VfioDevice) else "whole" if isinstance(device, WholeGpu) else "mig"


def _blocks(gpu: Gpu, devices: Sequence[JsonObject], *, has_card: bool) -> Iterator[_Block]:
    """Yield a block for each device without counters, and one for all devices of a counter set.

    That block reserves room for every device that the GPU could have, so that a change to one GPU never moves a device
    of another GPU to another slice.
    """
    profiles = gpu.partitioning.profiles if gpu.partitioning is not None and has_counters(gpu) else ()
    if not profiles and not has_card:
        yield from (_Block((device,), 1) for device in devices)
        return
    most = 1 + has_card + sum(len(row.placements) for row in profiles)
    for part in _chunks(devices, MAX_DEVICES_PER_SLICE):
        yield _Block(part, max(len(part), min(most, MAX_DEVICES_PER_SLICE)))


def _chunks(items: Sequence[T], size: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield tuple(items[start : start + size])


def device_faults(device: JsonObject) -> list[str]:
    name = device["name"]
    return [] if is_dns_label(name) else [f"device {name!r}: the name is not a DNS label"]


def counter_set_faults(entry: JsonObject) -> list[str]:
    count = len(entry["counters"])
    if 0 < count <= MAX_COUNTERS_PER_SET:
        return []
    return [
        f"counter set {entry['name']}: {count} counters, but only 1 to {MAX_COUNTERS_PER_SET} are allowed"
    ]


def has_its_counters(device: JsonObject, counter_sets: Iterable[JsonObject]) -> bool:
    known: JsonObject = {entry["name"]: entry["counters"] for entry in counter_sets}
    return all(
        use["counters"].keys() <= known.get(use["counterSet"], {}).keys()
        for use in device.get("consumesCounters", ())
    )
