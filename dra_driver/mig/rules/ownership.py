"""Which GPU instances are this driver's own, and which are somebody else's."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from dra_driver.model.mig import GpuInstance, OwnedInstance

Slot = tuple[int, int]
"""Profile ID and first memory slice of a GPU instance, as `GpuInstance.slot`."""


def at_slot(entry: OwnedInstance, found: Iterable[GpuInstance]) -> GpuInstance | None:
    """The GPU instance in the place that the ledger names; None if there is none."""
    return next((instance for instance in found if instance.slot == entry.slot), None)


def is_ours(entry: OwnedInstance, instance: GpuInstance, inside: Sequence[tuple[int, str]]) -> bool:
    """Whether the instance at the slot of `entry`, with these compute instances, can be the one that `entry` names."""
    if entry.gpu_instance_id not in (None, instance.gpu_instance_id):
        return False
    if entry.uuid is None:
        return len(inside) <= 1
    return all(uuid == entry.uuid for _, uuid in inside)


def instances_to_withhold(
    existing: Iterable[GpuInstance], ours: Container[Slot], leaving: Container[Slot]
) -> tuple[GpuInstance, ...]:
    """The instances of a GPU that are not to be given out: somebody else's, and those of ours that are `leaving`."""
    return tuple(
        replace(instance, leaving=instance.slot in ours and instance.slot in leaving)
        for instance in existing
        if instance.slot not in ours or instance.slot in leaving
    )
