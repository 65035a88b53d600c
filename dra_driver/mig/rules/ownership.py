"""Which GPU instances are this driver's own, which are somebody else's, and which of its own nobody needs any more."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.mig import GpuInstance, OwnedInstance

Slot = tuple[int, int]
"""Profile ID and first memory slice of a GPU instance, as `GpuInstance.slot`."""


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
