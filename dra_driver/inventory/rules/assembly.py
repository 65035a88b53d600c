"""Builds the inventory from NVML, the PCI bus and the previous inventory, and decides which changes matter.

It also computes NVLink domains: a deterministic partition of GPUs into fully connected groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import combinations

from dra_driver.errors import NvmlUnavailableError
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import CHANGED_BY_MIG, Fabric, Gpu
from dra_driver.model.health import PolledHealth
from dra_driver.model.host import HostFingerprint, NvmlFingerprint
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.model.units import counted


def unanswering(gpus: Sequence[Gpu], before: Inventory | None) -> tuple[Gpu, ...]:
    if before is None:
        return ()
    answering = {gpu.uuid for gpu in gpus} | {gpu.pci_bus_id for gpu in gpus}
    return tuple(
        gpu
        for gpu in before.every_gpu
        if gpu.pci_bus_id is not None and answering.isdisjoint((gpu.uuid, gpu.pci_bus_id))
    )


def with_unready_since(gpu: Gpu, before: Inventory | None, now: int) -> Gpu:
    fabric = gpu.unready_fabric
    if fabric is None:
        return gpu
    known = [] if before is None else [old.unready_fabric for old in before.gpus if old.uuid == gpu.uuid]
    since = next((old.since for old in known if old is not None and old.state == fabric.state), now)
    return replace(gpu, unready_fabric=replace(fabric, since=since))


def assembled(
    read: Inventory,
    gpus: tuple[Gpu, ...],
    lost: tuple[Gpu, ...],
    functions: Collection[str],
    before: Inventory | None,
) -> Inventory:
    """Return the inventory `read` with the offered `gpus` and the `lost` ones.

    Lost GPUs and those that are partitioned on demand keep their names, because MIG mode changes the minor number. A
    GPU in `functions` (PCI bus IDs) that NVML does not list is a fault.

    Raises: NvmlUnavailableError if the bus has GPUs but NVML lists none: on a new node the NVIDIA driver's files appear
    before its GPUs are bound, and an empty pool would be wrong.
    """
    hidden = sorted(set(functions).difference(gpu.pci_bus_id for gpu in gpus))
    if not gpus and not lost:
        _refuse_empty(read.faults, hidden)
    faults = read.faults + tuple(
        DiscoveryFault(
            f"GPU {bus_id}",
            "it is missing from NVML; it may be lost, drained, or bound to another driver",
        )
        for bus_id in hidden
    )
    known = {} if before is None else before.nvlink_domains
    domains = {gpu.uuid: known[gpu.uuid] for gpu in lost if gpu.uuid in known}
    kept = read.kept_names
    if kept is not None and before is not None:
        staying = {gpu.uuid for gpu in (*gpus, *lost) if gpu.partitioning is not None or gpu in lost}
        kept = {uuid: name for uuid, name in before.gpu_names.items() if uuid in staying} | dict(kept)
    return replace(
        read,
        gpus=gpus,
        lost=lost,
        faults=faults,
        nvlink_domains={**domains, **read.nvlink_domains},
        kept_names=kept,
    )


def _refuse_empty(faults: Sequence[DiscoveryFault], hidden: Sequence[str]) -> None:
    if faults:
        causes = "; ".join(f"{fault.subject}: {fault.text}" for fault in faults)
        raise NvmlUnavailableError(f"NVML cannot read any GPU: {causes}")
    if hidden:
        raise NvmlUnavailableError(
            f"NVML shows no GPU, but the PCI bus has {counted(len(hidden), 'GPU')} ({', '.join(hidden)}), perhaps "
            "not bound to the NVIDIA driver yet: see the kernel log, or wait for the driver's installer"
        )


@dataclass(frozen=True, slots=True)
class HardwareFingerprint:
    host: HostFingerprint
    nvml: NvmlFingerprint | None = None

    @property
    def lost_some(self) -> bool:
        return None in (self.nvml or ())


def is_other_hardware(now: HostFingerprint, before: HostFingerprint) -> bool:
    """Whether NVML must be initialised again."""
    return replace(now, instances={}) != replace(before, instances={})


def repartitioned_gpus(now: HardwareFingerprint, before: HardwareFingerprint) -> frozenset[str] | None:
    """Return the GPUs whose MIG mode, minor number or instances differ; None if anything else may differ too."""
    if _without_mig(now) != _without_mig(before):
        return None
    pairs = list(zip(now.nvml or (), before.nvml or (), strict=True))
    changed = {gpu.uuid for gpu, old in pairs if gpu is not None and gpu != old}
    for minor in now.host.instances.keys() | before.host.instances.keys():
        if now.host.instances.get(minor) == before.host.instances.get(minor):
            continue
        owners = {
            gpu.uuid for pair in pairs for gpu in pair if gpu is not None and gpu.values.get("minor") == minor
        }
        if not owners:
            return None
        changed |= owners
    return frozenset(changed)


def _without_mig(seen: HardwareFingerprint) -> HardwareFingerprint:
    """Remove what MIG changes. Everything else, including fields added later, counts as other hardware."""
    gpus = (gpu and replace(gpu, values=_others(gpu.values)) for gpu in seen.nvml or ())
    return replace(seen, host=replace(seen.host, instances={}), nvml=seen.nvml and tuple(gpus))


def _others(values: Mapping[str, Hashable]) -> Mapping[str, Hashable]:
    return {name: value for name, value in values.items() if name not in CHANGED_BY_MIG}


def differs(now: Inventory, before: Inventory | None) -> bool:
    """Whether there is anything to publish or report. Minor numbers that MIG mode changes are ignored."""
    return (
        before is None or now.gpu_names != before.gpu_names or _without_minors(now) != _without_minors(before)
    )


def is_other_nvlink(known: Inventory | None, gpu_uuid: str, polled: PolledHealth) -> bool:
    """Whether a poll found other active NVLinks, or another fabric registration, than the inventory has.

    A GPU that is partitioned on demand keeps both values while it is in MIG mode, so for such a GPU only a different
    fabric counts.
    """
    gpu = next((gpu for gpu in known.gpus if gpu.uuid == gpu_uuid), None) if known is not None else None
    if gpu is None:
        return False
    if polled.nvlinks is not None and len(polled.nvlinks.up) != gpu.nvlink_links:
        return True
    if polled.fabric is None:
        return False
    keeps_it = gpu.partitioning is not None and gpu.fabric is not None
    registration = polled.fabric_registration
    return gpu.fabric_registration != registration and (isinstance(registration, Fabric) or not keeps_it)


def _without_minors(inventory: Inventory) -> Inventory:
    return replace(
        inventory,
        gpus=tuple(map(_without_minor, inventory.gpus)),
        lost=tuple(map(_without_minor, inventory.lost)),
    )


def _without_minor(gpu: Gpu) -> Gpu:
    return gpu if gpu.partitioning is None else replace(gpu, minor=None)


Pair = frozenset[str]


def with_nvlink_domains(found: Inventory) -> Inventory:
    domains = nvlink_domains(found.gpus, found.reachable_pairs)
    return replace(found, nvlink_domains={**domains, **found.nvlink_domains})


def nvlink_domains(gpus: Sequence[Gpu], reachable: Mapping[Pair, int]) -> dict[str, str]:
    """Return the NVLink domain of each GPU that has one, by UUID.

    `reachable` maps pairs of UUIDs to the number of links between them, or any positive number behind a switch. GPUs
    with an equal domain reach each other pairwise, so a claim can use the domain as `matchAttribute`. Only a multi-node
    fabric gives a single GPU a domain.

    A GPU in MIG mode has no domain, because MIG disables peer access, unless it leaves MIG mode for a claim.
    """
    whole = [gpu for gpu in gpus if gpu.can_be_whole]
    domains = _fabric_domains({gpu.uuid: gpu.fabric.domains for gpu in whole if gpu.fabric is not None})
    remaining = [gpu.uuid for gpu in whole if gpu.uuid not in domains]
    names = gpu_device_names(gpu.uuid for gpu in gpus)
    while remaining:
        group = _heaviest_clique(remaining, reachable)
        if len(group) < 2:
            break
        label = names[min(group)].removeprefix("gpu-")
        domains.update(dict.fromkeys(group, f"nvlink-{label}"))
        remaining = [uuid for uuid in remaining if uuid not in group]
    return domains


def _fabric_domains(choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return one domain for each GPU that has any: the one with most GPUs.

    Among equals, the one that the first GPU names first is used, so that nodes with equal GPUs choose the same domain.
    """
    chosen: dict[str, str] = {}
    remaining = {uuid: names for uuid, names in choices.items() if names}
    while remaining:
        sizes = Counter(name for names in remaining.values() for name in names)
        ((largest, _),) = sizes.most_common(1)
        members = [uuid for uuid, names in remaining.items() if largest in names]
        chosen.update(dict.fromkeys(members, largest))
        remaining = {uuid: names for uuid, names in remaining.items() if uuid not in members}
    return chosen


def _heaviest_clique(uuids: Sequence[str], reachable: Mapping[Pair, int]) -> tuple[str, ...]:
    """Prefer the largest fully connected group, then the one with most links, then the first in order."""
    neighbours = {
        uuid: {other for other in uuids if other != uuid and reachable.get(frozenset((uuid, other)), 0) > 0}
        for uuid in uuids
    }
    order = {uuid: position for position, uuid in enumerate(uuids)}

    def rank(clique: frozenset[str]) -> tuple[int, int, list[int]]:
        weight = sum(reachable[frozenset(pair)] for pair in combinations(sorted(clique), 2))
        return (-len(clique), -weight, sorted(order[uuid] for uuid in clique))

    cliques = _maximal_cliques(neighbours)
    best = min(cliques, key=rank, default=frozenset())
    return tuple(sorted(best, key=order.__getitem__))


def _maximal_cliques(neighbours: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Return all maximal cliques (Bron-Kerbosch with a pivot). A node has at most sixteen GPUs."""
    found: list[frozenset[str]] = []

    def expand(chosen: frozenset[str], candidates: set[str], excluded: set[str]) -> None:
        if not candidates and not excluded:
            found.append(chosen)
            return
        pivot = max(sorted(candidates | excluded), key=lambda uuid: len(neighbours[uuid] & candidates))
        for uuid in sorted(candidates - neighbours[pivot]):
            expand(chosen | {uuid}, candidates & neighbours[uuid], excluded & neighbours[uuid])
            candidates = candidates - {uuid}
            excluded = excluded | {uuid}

    if neighbours:
        expand(frozenset(), set(neighbours), set())
    return found
