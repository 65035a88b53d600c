"""Decides which devices of a GPU can be published, depending on who created the instances on it."""

from __future__ import annotations

from collections.abc import Sequence

from dra_driver.journal.ledger import Ledger
from dra_driver.mig.rules.offered_devices import (
    instances_of,
    instances_to_withhold,
    is_fully_read,
    offered_as_before,
    offered_beside,
    offered_without_partitioning,
)
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, OwnedInstance, OwnedMode
from dra_driver.model.steps import CreateMig


@dataclass(frozen=True, slots=True)
class MigOwnership:
    """Which GPU instances and MIG modes the plugin created. Methods raise StateError.

    Details count for 30 s after their removal, because a hardware scan may have begun before. With `all_undone`, no
    undo counts as failed.
    """

    ledger: Ledger
    all_undone: bool = False

    def foreign_instances(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Return foreign instances, and ours whose undo failed, which are marked `leaving`."""
        if not existing:
            return ()
        # Read in this order, so that the instance of an entry that is removed in between does not look foreign.
        now = self.ledger.details(OwnedInstance, gpu_uuid)
        ours = {one.slot for one in (*now, *self.ledger.recently_removed(OwnedInstance, gpu_uuid))}
        pending = () if self.all_undone else self.ledger.pending({gpu_uuid})
        failed = (one for one in pending if one.cause is not None)
        steps = [step for one in failed for step in one.steps]
        return instances_to_withhold(
            existing, ours, {one.slot for one in steps if isinstance(one, CreateMig)}
        )

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """Still True for a moment after MIG mode was switched off."""
        now = self.ledger.details(OwnedMode, gpu_uuid)
        return bool(now or self.ledger.recently_removed(OwnedMode, gpu_uuid))


class MigOffer:
    """Methods raise StateError."""

    def __init__(self, ownership: MigOwnership | None) -> None:
        """Without an `ownership`, every instance and MIG mode counts as foreign."""
        self._ownership = ownership

    def of(self, gpu: Gpu, read: Inventory, before: Inventory | None) -> Gpu:
        """Return the GPU, reduced to the devices that can be published.

        If part of the GPU could not be read, the devices in `before` remain; without these, it is published without our
        own instances.
        """
        if not is_fully_read(gpu, read):
            return offered_as_before(gpu, before) or offered_without_partitioning(
                gpu, self._foreign(gpu, instances_of(gpu))
            )
        if gpu.partitioning is None:
            return gpu
        return offered_beside(
            gpu,
            gpu.partitioning,
            self._foreign(gpu, gpu.partitioning.withheld),
            mode_is_foreign=self._mode_is_foreign(gpu, gpu.mig_enabled),
        )

    def is_unchanged(self, gpu: Gpu, mode_is_on: bool, existing: Sequence[GpuInstance]) -> bool:
        """Whether `of` would return the same with this MIG mode and these instances.

        False with a foreign instance, because its MIG devices may have changed.
        """
        if gpu.partitioning is None or gpu.partitioning.withheld or self._foreign(gpu, existing):
            return False
        return gpu.mig_enabled == self._mode_is_foreign(gpu, mode_is_on)

    def _foreign(self, gpu: Gpu, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        if self._ownership is None or not existing:
            return tuple(existing)
        return self._ownership.foreign_instances(gpu.uuid, existing)

    def _mode_is_foreign(self, gpu: Gpu, mode_is_on: bool) -> bool:
        return mode_is_on and (self._ownership is None or not self._ownership.mode_is_ours(gpu.uuid))
