"""Which devices of a GPU can be published, and which GPU instances belong to this plugin."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.dataclass import replace
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, MigDevice, OwnedInstance, Partitioning

Slot = tuple[int, int]


def at_slot(entry: OwnedInstance, found: Iterable[GpuInstance]) -> GpuInstance | None:
    return next((instance for instance in found if instance.slot == entry.slot), None)


def is_ours(entry: OwnedInstance, instance: GpuInstance, inside: Sequence[tuple[int, str]]) -> bool:
    """Whether the instance at the slot, with these compute instances, can be the entry's instance."""
    if entry.gpu_instance_id not in (None, instance.gpu_instance_id):
        return False
    if entry.uuid is None:
        return len(inside) <= 1
    return all(uuid == entry.uuid for _, uuid in inside)


def instances_to_withhold(
    existing: Iterable[GpuInstance], ours: Container[Slot], leaving: Container[Slot]
) -> tuple[GpuInstance, ...]:
    """Return foreign instances, and our own ones in `leaving`: no claim must use them."""
    return tuple(
        replace(instance, leaving=instance.slot in ours and instance.slot in leaving)
        for instance in existing
        if instance.slot not in ours or instance.slot in leaving
    )


def is_fully_read(gpu: Gpu, read: Inventory) -> bool:
    if gpu.uuid in read.unread:
        return False
    return gpu.partitioning is not None or all(fault.subject != f"GPU {gpu.uuid}" for fault in read.faults)


def offered_beside(
    gpu: Gpu, raw: Partitioning, foreign: Sequence[GpuInstance], *, mode_is_foreign: bool
) -> Gpu:
    """`raw` is the GPU's partitioning as read; `mode_is_foreign`: MIG mode is on, and this plugin did not enable it."""
    return replace(
        gpu,
        partitioning=partitioned(raw, foreign, offers_whole=raw.offers_whole and not mode_is_foreign),
        mig_devices=_devices_in(gpu, foreign),
        mig_enabled=mode_is_foreign,
    )


def offered_as_before(gpu: Gpu, before: Inventory | None) -> Gpu | None:
    """Return a GPU with its devices of an earlier inventory; None if it had no partitioning there."""
    gpus = before.every_gpu if before is not None else ()
    known = next((one for one in gpus if one.uuid == gpu.uuid and one.partitioning is not None), None)
    if known is None:
        return None
    return replace(
        gpu,
        mig_capable=known.mig_capable,
        partitioning=known.partitioning,
        mig_devices=known.mig_devices,
        mig_enabled=known.mig_enabled,
    )


def instances_of(gpu: Gpu) -> tuple[GpuInstance, ...]:
    found = {
        mig.gpu_instance_id: GpuInstance(mig.gpu_instance_id, mig.profile.profile_id, mig.placement)
        for mig in gpu.mig_devices
    }
    return tuple(found.values())


def offered_without_partitioning(gpu: Gpu, foreign: Sequence[GpuInstance]) -> Gpu:
    """Return a GPU on which nothing can be created on demand, with only the devices in `foreign` instances."""
    return replace(gpu, mig_devices=_devices_in(gpu, foreign), partitioning=None)


def _devices_in(gpu: Gpu, instances: Sequence[GpuInstance]) -> tuple[MigDevice, ...]:
    ids = {instance.gpu_instance_id for instance in instances}
    return tuple(mig for mig in gpu.mig_devices if mig.gpu_instance_id in ids)
