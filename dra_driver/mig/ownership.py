"""Which GPU instances and MIG modes are this driver's own, by the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dra_driver.mig.ledger import MigLedger
from dra_driver.mig.rules.ownership import Slot, instances_to_withhold
from dra_driver.model.mig import GpuInstance, OwnedInstance


class LedgerOwnership:
    """Answers from the ledger, for one boot. Needs no lock. Raises, all: StateError."""

    def __init__(self, ledger: MigLedger, boot_id: str) -> None:
        self._ledger = ledger
        self._boot_id = boot_id

    def created_instance(self, device: str) -> OwnedInstance | None:
        """The device as it was made in this boot, with IDs and UUID; None if it was not."""
        entry = self._ledger.get(device)
        is_made = entry is not None and entry.boot_id == self._boot_id and entry.phase == "created"
        return entry if is_made else None

    def entries_of(self, gpu_uuid: str) -> Mapping[Slot, OwnedInstance]:
        """A GPU's entries of this boot by slot."""
        return {
            entry.slot: entry
            for entry in self._ledger.all().values()
            if entry.gpu_uuid == gpu_uuid and entry.boot_id == self._boot_id
        }

    def foreign_instances(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Those of a GPU's instances that are not to be given out: somebody else's, and orphans of ours, which are
        marked `leaving`."""
        if not existing:
            return ()
        # In this order: what is removed between the two looks must not seem to be somebody else's.
        ours = {
            (profile_id, start)
            for uuid, profile_id, start in self._ledger.owned_lately(self._boot_id)
            if uuid == gpu_uuid
        }
        orphans = {slot for slot, entry in self.entries_of(gpu_uuid).items() if entry.phase == "orphan"}
        return instances_to_withhold(existing, ours, orphans)

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """Whether we switched the GPU's MIG mode on; also where we left it less than half a minute ago, because the
        question may come from a look at the hardware that began before."""
        return self._ledger.mode_owned_lately(gpu_uuid, self._boot_id)
