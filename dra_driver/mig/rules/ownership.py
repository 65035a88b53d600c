"""Which GPU instances are this driver's own, which are somebody else's, and which of its own nobody needs any more."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dra_driver.model.mig import GpuInstance, OwnedInstance

Slot = tuple[int, int]
"""Profile ID and first memory slice of a GPU instance, as `GpuInstance.slot`."""


@dataclass(frozen=True, slots=True)
class FoundInstance:
    """A GPU instance with the ID and MIG UUID of each compute instance in it."""

    instance: GpuInstance
    compute_instances: tuple[tuple[int, str], ...]

    @property
    def uuids(self) -> frozenset[str]:
        """The MIG devices in it."""
        return frozenset(uuid for _, uuid in self.compute_instances)


def at_slot(entry: OwnedInstance, found: Iterable[GpuInstance]) -> GpuInstance | None:
    """The GPU instance in the place that the ledger's entry names; None if there is none."""
    return next((instance for instance in found if instance.slot == entry.slot), None)


def is_ours(entry: OwnedInstance, instance: GpuInstance, inside: Sequence[tuple[int, str]]) -> bool:
    """Whether the instance at the entry's slot, with these compute instances, can be the one that the entry names."""
    if entry.gpu_instance_id not in (None, instance.gpu_instance_id):
        return False
    if entry.uuid is None:
        return len(inside) <= 1
    return all(uuid == entry.uuid for _, uuid in inside)


def instances_to_withhold(
    existing: Iterable[GpuInstance], ours: Container[Slot], orphans: Container[Slot]
) -> tuple[GpuInstance, ...]:
    """The instances of a GPU that are not to be given out: somebody else's, and orphans of ours, marked `leaving`."""
    return tuple(
        replace(instance, leaving=instance.slot in orphans)
        for instance in existing
        if instance.slot not in ours or instance.slot in orphans
    )


def is_left_over(entry: OwnedInstance, boot_id: str, users: Mapping[str, str]) -> bool:
    """Whether the entry's instance, or what remains of it, is to be destroyed because no claim and no layout wants it.

    `users` names the claim of each used device.
    """
    if entry.boot_id != boot_id or entry.phase == "orphan":
        return True
    return not entry.is_of_layout and entry.device not in users


def foreign_to_destroy(
    found: Iterable[FoundInstance],
    ours: Container[Slot],
    held_uuids: Collection[str],
    only: Collection[str] | None,
) -> tuple[list[FoundInstance], frozenset[str]]:
    """Of a GPU's instances those that somebody else made and no claim holds, and the MIG devices in the ones that
    claims do hold. With `only`, no instance counts but those with one of these MIG devices."""
    foreign = [
        item
        for item in found
        if item.instance.slot not in ours and (only is None or item.uuids.intersection(only))
    ]
    held = [item for item in foreign if item.uuids.intersection(held_uuids)]
    free = [item for item in foreign if item not in held]
    return free, frozenset().union(*(item.uuids for item in held))
