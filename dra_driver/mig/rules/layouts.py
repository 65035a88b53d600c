"""MIG layouts: which instances each GPU of a node should have, as in NVIDIA's mig-parted, and their placements.

An entry applies to all GPUs or to some by index, in PCI order, and can be limited to certain PCI IDs. The last matching
entry applies, as with mig-parted. A GPU without one is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dra_driver.mig.rules.counters import fits_beside
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, LayoutEntry, Layouts, PlacedProfile, Placement

Slot = tuple[int, int]
"""Profile ID and first memory slice of a GPU instance, like `GpuInstance.slot`."""

_GENERATED = "all-"
_BALANCED_SLICES = (1, 1, 2, 3)
_NO_MIG = "the GPU has no MIG"


@dataclass(frozen=True, slots=True)
class LayoutTarget:
    """With `only_mode` the instances are not changed."""

    mode: bool
    slots: tuple[tuple[PlacedProfile, Placement], ...] = ()
    only_mode: bool = False


class LayoutRefusedError(ValueError):
    """The GPU does not support the layout; nothing was changed."""


class NoMigError(LayoutRefusedError):
    """No entry names the GPU, so the layout is meant for the other GPUs."""

    def __init__(self) -> None:
        super().__init__(_NO_MIG)


def layout_gpus(inventory: Inventory) -> list[tuple[int, Gpu]]:
    """Return the GPUs that NVML can read, with their index among all GPUs."""
    away = inventory.lost_uuids | inventory.under_vfio.keys()
    return [(index, gpu) for index, gpu in enumerate(inventory.offered_gpus) if gpu.uuid not in away]


def absent_indices(name: str, layouts: Layouts, count: int) -> list[int]:
    """Return the indices that a node with `count` GPUs does not have.

    Ignores entries with filters, which may be meant for other nodes.
    """
    named = (entry.devices or () for entry in layouts.get(name, ()) if not entry.filters)
    return sorted({index for devices in named for index in devices if index >= count})


def entry_for(
    name: str, layouts: Layouts, index: int, pci_id: str | None, profiles: Sequence[PlacedProfile]
) -> LayoutEntry | None:
    """Return the named layout's entry for the GPU with this index in PCI order and PCI ID.

    `profiles` is empty for a GPU without MIG. Raises: LayoutRefusedError if there is no such layout; NoMigError.
    """
    if name in layouts:
        found = [entry for entry in layouts[name] if _is_for(entry, index, pci_id)]
        entry = found[-1] if found else None
    else:
        entry = _generated(name, profiles)
        if entry is None and profiles:
            known = ", ".join(sorted({*layouts, *generated_names(profiles)}))
            raise LayoutRefusedError(f"unknown layout {name!r}; available: {known}")
        entry = entry or LayoutEntry(mode=True)
    if not profiles and entry is not None and entry.mode and entry.devices is None:
        raise NoMigError
    return entry


def generated_names(profiles: Sequence[PlacedProfile]) -> tuple[str, ...]:
    """Return the layouts that exist without any configuration."""
    by_profile = [_GENERATED + _in_name(row.profile.name) for row in profiles]
    return ("all-disabled", "all-enabled", "all-balanced", *sorted(by_profile))


def _is_for(entry: LayoutEntry, index: int, pci_id: str | None) -> bool:
    if entry.filters and (pci_id is None or pci_id not in entry.filters):
        return False
    return entry.devices is None or index in entry.devices


def _generated(name: str, profiles: Sequence[PlacedProfile]) -> LayoutEntry | None:
    match name:
        case "all-disabled":
            return LayoutEntry(mode=False)
        case "all-enabled":
            return LayoutEntry(mode=True)
        case "all-balanced":
            return LayoutEntry(mode=True, counts=_balanced(profiles)) if profiles else None
    for row in profiles:
        if name == _GENERATED + _in_name(row.profile.name):
            wanted = {row.profile.name: row.profile.max_instances}
            return LayoutEntry(mode=True, counts=largest_that_fits(wanted, profiles))
    return None


def _in_name(profile: str) -> str:
    return profile.replace("+", ".")


def _balanced(profiles: Sequence[PlacedProfile]) -> Mapping[str, int]:
    """Return two instances with one slice, one with two and one with three, as far as they fit."""
    plain = [row.profile for row in profiles if row.profile.name.partition("gb")[2] == ""]
    smallest = {
        slices: min(
            (profile for profile in plain if profile.slice_count == slices), key=lambda one: one.memory_mib
        ).name
        for slices in {profile.slice_count for profile in plain}
    }
    wanted = Counter(smallest[slices] for slices in _BALANCED_SLICES if slices in smallest)
    return largest_that_fits(wanted, profiles)


def target_of(
    entry: LayoutEntry,
    profiles: Sequence[PlacedProfile],
    existing: Sequence[GpuInstance],
    fixed: Iterable[Slot],
) -> LayoutTarget:
    """Return the desired state of a GPU for an entry, with a placement for each instance.

    Matching instances keep their place if the others then still fit; those at the `fixed` slots always do. Raises:
    LayoutRefusedError if the GPU cannot have the layout.
    """
    if not profiles and entry.mode:
        raise LayoutRefusedError(_NO_MIG)
    stays = [instance for instance in existing if instance.slot in set(fixed)]
    if not entry.counts:
        if stays and not entry.mode:
            raise LayoutRefusedError(_in_the_way(stays[0]))
        return LayoutTarget(entry.mode, only_mode=entry.mode)
    by_name = {row.profile.name: row for row in profiles}
    unknown = sorted(entry.counts.keys() - by_name.keys())
    if unknown:
        known = ", ".join(sorted(by_name))
        raise LayoutRefusedError(f"the GPU has no profile {unknown[0]}; its profiles are: {known}")
    if not is_placeable(entry.counts, profiles):
        nearest = largest_that_fits(entry.counts, profiles)
        raise LayoutRefusedError(
            f"{counts_text(entry.counts)} does not fit on the GPU in any order; the nearest layout that fits is "
            f"{counts_text(nearest)}"
        )
    wanted = _wanted(entry.counts, by_name)
    for kept in ([*stays, *(one for one in existing if one not in stays)], stays):
        placed = _placed(wanted, profiles, kept, must_keep=stays)
        if placed is not None:
            return LayoutTarget(True, placed)
    raise LayoutRefusedError(_in_the_way(stays[0]))


def is_placeable(counts: Mapping[str, int], profiles: Sequence[PlacedProfile]) -> bool:
    return _placed(_wanted(counts, {row.profile.name: row for row in profiles}), profiles, ()) is not None


def largest_that_fits(counts: Mapping[str, int], profiles: Sequence[PlacedProfile]) -> Mapping[str, int]:
    """Return the counts, reduced until everything fits on a GPU. The largest profiles are kept first."""
    by_name = {row.profile.name: row for row in profiles}
    names = [name for name in counts if name in by_name]
    fitting: dict[str, int] = {}
    for name in sorted(names, key=lambda one: _order(by_name[one])):
        for count in range(min(counts[name], by_name[name].profile.max_instances), 0, -1):
            if is_placeable({**fitting, name: count}, profiles):
                fitting[name] = count
                break
    return fitting


def counts_text(counts: Mapping[str, int]) -> str:
    """Return for example `2 x 1g.10gb and 1 x 3g.40gb`."""
    return " and ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "no instance"


def _in_the_way(instance: GpuInstance) -> str:
    return (
        f"GPU instance {instance.gpu_instance_id} (profile {instance.profile_id} at memory slice "
        f"{instance.placement.start}) was created by another program and does not fit the layout; destroy it "
        "with `nvidia-smi mig`, or set migLayouts.adopt to destroy"
    )


def _order(row: PlacedProfile) -> tuple[int, int, int]:
    size = max((placement.size for placement in row.placements), default=0)
    return (-size, -row.profile.slice_count, row.profile.profile_id)


def _wanted(counts: Mapping[str, int], by_name: Mapping[str, PlacedProfile]) -> list[PlacedProfile] | None:
    """Return every instance, the largest first; None if a profile exceeds its maximum."""
    if any(count > by_name[name].profile.max_instances for name, count in counts.items()):
        return None
    rows = sorted((by_name[name] for name, count in counts.items() if count), key=_order)
    return [row for row in rows for _ in range(counts[row.profile.name])]


def _placed(
    wanted: Sequence[PlacedProfile] | None,
    profiles: Sequence[PlacedProfile],
    kept: Sequence[GpuInstance],
    must_keep: Sequence[GpuInstance] = (),
) -> tuple[tuple[PlacedProfile, Placement], ...] | None:
    """Return a placement for each wanted instance. Matching `kept` instances keep theirs.

    None if there is no solution, or if one of `must_keep` would not be used.
    """
    if wanted is None:
        return None
    table = tuple(profiles)
    left = list(wanted)
    used: list[tuple[PlacedProfile, Placement]] = []
    for instance in kept:
        row = next((row for row in left if row.profile.profile_id == instance.profile_id), None)
        if row is not None:
            left.remove(row)
            used.append((row, instance.placement))
        elif instance in must_keep:
            return None
    free_slices = len({number for row in table for one in row.placements for number in one.memory_slices})
    sizes = [max((one.size for one in row.placements), default=0) for row in wanted]
    if sum(sizes) > free_slices:
        return None
    found = _search(left, table, used)
    return None if found is None else tuple(sorted(found, key=lambda pair: pair[1]))


def _search(
    left: Sequence[PlacedProfile],
    table: tuple[PlacedProfile, ...],
    used: Sequence[tuple[PlacedProfile, Placement]],
    after: Placement | None = None,
) -> list[tuple[PlacedProfile, Placement]] | None:
    """Identical profiles are adjacent in `left`. Their order does not matter, so only placements after `after`, the
    previous one's, are tried.
    """
    if not left:
        return list(used)
    row, others = left[0], left[1:]
    instances = [
        GpuInstance(number, other.profile.profile_id, placement)
        for number, (other, placement) in enumerate(used)
    ]
    for placement in row.placements:
        if after is not None and placement <= after:
            continue
        if any(placement.overlaps(taken) for _, taken in used):
            continue
        if not fits_beside(table, instances, row.profile, placement):
            continue
        is_same_next = bool(others) and others[0] is row
        found = _search(others, table, [*used, (row, placement)], placement if is_same_next else None)
        if found is not None:
            return found
    return None
