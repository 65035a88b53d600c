"""Expresses MIG on demand as counters, which admit exactly the sets of devices that fit together on a GPU.

Every GPU has a counter set with its engines and one counter for each memory slice. Each device consumes its part, and
the whole GPU everything. The names are those of NVIDIA's driver, because quota systems rely on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DynamicMigDevice, Inventory, VfioDevice, WholeGpu
from dra_driver.model.mig import GpuInstance, MigProfile, Partitioning, PlacedProfile, Placement
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import format_bytes

Amounts = Mapping[str, int]

_MIB = 1 << 20
_MEMORY = "memory"
_SHARED_OUT = ("multiprocessors", "copy-engines", _MEMORY)
"""Counters whose parts are rounded for each profile. For media engines, the total is the number in the largest profile:
only this prevents two profiles with a media extension at the same time."""


def partitioned(raw: Partitioning, withheld: Sequence[GpuInstance], *, offers_whole: bool) -> Partitioning:
    """Return the partitioning with all devices that fit next to the `withheld` instances, in publishing order.

    The scheduler takes the first suitable device. So small profiles come first, profiles with a media extension after
    those without, and placements from the end of the memory: large ones, which begin at the front, stay free as long as
    possible.
    """
    possible = _possible(raw.profiles, withheld)
    staying = [instance for instance in withheld if not instance.leaving]
    is_leaving = len(staying) < len(withheld)
    returning = set(_possible(raw.profiles, staying)).difference(possible) if is_leaving else ()
    return Partitioning(
        raw.profiles,
        possible,
        tuple(sorted(withheld, key=lambda instance: instance.placement)),
        offers_whole and not withheld,
        tuple(sorted(returning, key=_publishing_order)),
        offers_whole and is_leaving and not staying,
    )


def _possible(
    profiles: tuple[PlacedProfile, ...], withheld: Iterable[GpuInstance]
) -> tuple[tuple[MigProfile, Placement], ...]:
    left = _left(profiles, withheld)
    possible = (
        (row.profile, placement)
        for row in profiles
        for placement in row.placements
        if _fits(_use(row.profile, placement, left), left)
    )
    return tuple(sorted(possible, key=_publishing_order))


def fits_beside(
    profiles: tuple[PlacedProfile, ...],
    instances: Iterable[GpuInstance],
    profile: MigProfile,
    placement: Placement,
) -> bool:
    left = _left(profiles, instances)
    return _fits(_use(profile, placement, left), left)


def has_counters(gpu: Gpu) -> bool:
    return gpu.partitioning is not None and bool(gpu.partitioning.possible)


def is_counted(gpu: Gpu, inventory: Inventory) -> bool:
    """Also without MIG devices, if both containers and virtual machines may get the GPU."""
    return has_counters(gpu) or (gpu.uuid in inventory.cards_by_gpu and gpu.uuid not in inventory.under_vfio)


def counter_set(gpu_name: str, gpu: Gpu) -> JsonObject:
    """Return one entry of `spec.sharedCounters`, without the amounts of withheld instances.

    A GPU without MIG devices has one counter, so that it goes either to containers or to a virtual machine.
    """
    counters: JsonObject = {"gpu": {"value": "1"}}
    if gpu.partitioning is not None and has_counters(gpu):
        counters = _wire(_left(gpu.partitioning.profiles, gpu.partitioning.withheld))
    return {"name": f"{gpu_name}-counter-set", "counters": counters}


def consumed_counters(
    device: WholeGpu | DynamicMigDevice | VfioDevice, counters: JsonObject
) -> list[JsonObject]:
    """Return `consumesCounters`: the device's part of its GPU's `counter_set`."""
    if isinstance(device, DynamicMigDevice):
        consumed = _wire(_use(device.profile, device.placement, counters["counters"]))
    else:
        consumed = dict(counters["counters"])
    return [{"counterSet": counters["name"], "counters": consumed}]


def _publishing_order(entry: tuple[MigProfile, Placement]) -> tuple[int, ...]:
    profile, placement = entry
    media = profile.decoders + profile.encoders + profile.jpeg_engines + profile.ofa_engines
    return (placement.size, profile.multiprocessors, media, profile.profile_id, -placement.start)


def _amounts(profile: MigProfile) -> Amounts:
    return {
        "multiprocessors": profile.multiprocessors,
        "copy-engines": profile.copy_engines,
        "decoders": profile.decoders,
        "encoders": profile.encoders,
        "jpeg-engines": profile.jpeg_engines,
        "ofa-engines": profile.ofa_engines,
        _MEMORY: profile.memory_mib,
    }


def _slices(placement: Placement) -> Amounts:
    return {f"memory-slice-{number}": 1 for number in placement.memory_slices}


def _instances(profile: MigProfile) -> str:
    return f"instances-{profile.profile_id}"


def _use(profile: MigProfile, placement: Placement, counters: Mapping[str, object]) -> Amounts:
    counted = {_instances(profile): 1} if _instances(profile) in counters else {}
    return {**_amounts(profile), **_slices(placement), **counted}


def _fits(use: Amounts, left: Amounts) -> bool:
    return all(amount <= left[name] for name, amount in use.items())


def _left(profiles: tuple[PlacedProfile, ...], withheld: Iterable[GpuInstance]) -> dict[str, int]:
    """Count only the slices of an instance of an unknown profile."""
    left = dict(_totals(profiles))
    known = {row.profile.profile_id: row.profile for row in profiles}
    for instance in withheld:
        profile = known.get(instance.profile_id)
        use = _slices(instance.placement) if profile is None else _use(profile, instance.placement, left)
        for name, amount in use.items():
            if name in left:
                left[name] = max(0, left[name] - amount)
    return left


@lru_cache(maxsize=32)
def _totals(profiles: tuple[PlacedProfile, ...]) -> Amounts:
    """Return all counters of an empty GPU; memory in MiB."""
    scarce = frozenset(row.profile.profile_id for row in profiles if _runs_out(row))
    totals: dict[str, int] = {}
    for name in _amounts(profiles[0].profile) if profiles else ():
        totals[name] = max(_amounts(row.profile)[name] for row in profiles)
        if name in _SHARED_OUT:
            totals[name] = max(totals[name], _most_at_once(profiles, scarce, name))
    instances = {
        _instances(row.profile): row.profile.max_instances
        for row in profiles
        if row.profile.profile_id in scarce and not _bounded(row.profile, totals)
    }
    for row in profiles:
        for placement in row.placements:
            totals.update(_slices(placement))
    return totals | instances


def _runs_out(row: PlacedProfile) -> bool:
    """Whether the GPU allows fewer instances of a profile than fit into the memory slices."""
    count, end = 0, 0
    for placement in sorted(row.placements, key=lambda entry: entry.start + entry.size):
        if placement.start >= end:
            count, end = count + 1, placement.start + placement.size
    return row.profile.max_instances < count


def _bounded(profile: MigProfile, totals: Amounts) -> bool:
    """Whether the `totals` alone exclude more than `max_instances` instances."""
    above = profile.max_instances + 1
    return any(amount * above > totals[name] for name, amount in _amounts(profile).items())


def _most_at_once(profiles: tuple[PlacedProfile, ...], scarce: frozenset[int], name: str) -> int:
    """Return the most of a counter that instances can use at once, within `max_instances` of each `scarce` profile."""
    options: dict[int, list[tuple[int, MigProfile, int]]] = {}
    for row in profiles:
        amount = _amounts(row.profile)[name]
        for placement in row.placements:
            options.setdefault(placement.start, []).append((placement.size, row.profile, amount))
    starts = sorted(options)

    @cache
    def best(position: int, spent: tuple[int, ...]) -> int:
        """`spent` are the scarce profiles used before slice `position`."""
        start = next((entry for entry in starts if entry >= position), None)
        if start is None:
            return 0
        most = best(start + 1, spent)
        for size, profile, amount in options[start]:
            is_scarce = profile.profile_id in scarce
            if is_scarce and spent.count(profile.profile_id) >= profile.max_instances:
                continue
            after = tuple(sorted((*spent, profile.profile_id))) if is_scarce else spent
            most = max(most, amount + best(start + max(size, 1), after))
        return most

    return best(0, ())


def _wire(amounts: Amounts) -> JsonObject:
    return {
        name: {"value": format_bytes(amounts[name] * _MIB) if name == _MEMORY else str(amounts[name])}
        for name in sorted(amounts)
    }
