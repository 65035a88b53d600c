"""What of a GPU is on offer, given what is there and who made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from dra_driver.core.partitions import partitioned
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, Partitioning


class MigOwnership(Protocol):
    """Which GPU instances and MIG modes are of this driver's making. Raises, all: StateError."""

    def sort_out(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Those of the instances on a GPU that are not ours to give out."""

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """Whether we switched MIG mode on, now or until a moment ago."""


class NothingOwned:
    """Where no MIG device is made on demand, all that exist are somebody's own."""

    def sort_out(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """All of them."""
        return tuple(existing)

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """Never."""
        return False


class Offer:
    """Reduces what was read of GPUs to what is offered of them, which never depends on what we made there."""

    def __init__(self, ownership: MigOwnership) -> None:
        self._ownership = ownership

    def of(self, gpu: Gpu, read: Inventory, before: Inventory | None) -> Gpu:
        """A GPU of the inventory `read`. One that was partitioned in the inventory `before` and of which something
        could not be read now stays as it was; one of which nothing is known from before is offered without what is
        ours. Raises: StateError."""
        if gpu.uuid not in read.unread and (gpu.partitioning is not None or not _has_fault(gpu, read)):
            return gpu if gpu.partitioning is None else self._partitioned(gpu, gpu.partitioning)
        known = None if before is None else _partitioned_in(before, gpu.uuid)
        if known is not None:
            return replace(
                gpu,
                mig_capable=known.mig_capable,
                partitioning=known.partitioning,
                mig_devices=known.mig_devices,
                mig_enabled=known.mig_enabled,
            )
        return self._without_ours(gpu)

    def is_unchanged(self, gpu: Gpu, mode_is_on: bool, existing: Sequence[GpuInstance]) -> bool:
        """Whether the offer of a GPU, as `of` returned it, is the same with this MIG mode and these instances. No
        where somebody else's are there: MIG devices within them may have changed. Raises: StateError."""
        if gpu.partitioning is None or gpu.partitioning.withheld:
            return False
        if existing and self._ownership.sort_out(gpu.uuid, existing):
            return False
        return gpu.mig_enabled == self._mode_is_anothers(gpu, mode_is_on)

    def _partitioned(self, gpu: Gpu, raw: Partitioning) -> Gpu:
        withheld = self._ownership.sort_out(gpu.uuid, raw.withheld)
        foreign = {instance.gpu_instance_id for instance in withheld}
        mode_is_anothers = self._mode_is_anothers(gpu, gpu.mig_enabled)
        return replace(
            gpu,
            partitioning=partitioned(raw, withheld, offers_whole=raw.offers_whole and not mode_is_anothers),
            mig_devices=tuple(mig for mig in gpu.mig_devices if mig.gpu_instance_id in foreign),
            mig_enabled=mode_is_anothers,
        )

    def _without_ours(self, gpu: Gpu) -> Gpu:
        instances = {
            mig.gpu_instance_id: GpuInstance(mig.gpu_instance_id, mig.profile.profile_id, mig.placement)
            for mig in gpu.mig_devices
        }
        foreign = {
            item.gpu_instance_id for item in self._ownership.sort_out(gpu.uuid, tuple(instances.values()))
        }
        kept = tuple(mig for mig in gpu.mig_devices if mig.gpu_instance_id in foreign)
        return replace(gpu, mig_devices=kept, partitioning=None)

    def _mode_is_anothers(self, gpu: Gpu, mode_is_on: bool) -> bool:
        return mode_is_on and not self._ownership.mode_is_ours(gpu.uuid)


def _has_fault(gpu: Gpu, read: Inventory) -> bool:
    return any(fault.subject == f"GPU {gpu.uuid}" for fault in read.faults)


def _partitioned_in(inventory: Inventory, gpu_uuid: str) -> Gpu | None:
    return next(
        (gpu for gpu in inventory.every_gpu if gpu.uuid == gpu_uuid and gpu.partitioning is not None), None
    )
