"""The state that the plugin has saved on a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.dataclass import dataclass
from dra_driver.model.health import HealthState
from dra_driver.model.ids import mig_device_name
from dra_driver.model.inventory import Inventory
from dra_driver.model.maintenance import Maintenance
from dra_driver.model.mig import GpuLayout, OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig

BOOT_UNKNOWN = (
    "the ID of this boot cannot be read, so a claim that is shown as prepared may be from before the last reboot; "
    "mount the node's /proc"
)


@dataclass(frozen=True, slots=True)
class SavedHealth:
    """What the plugin saved in this boot. `known` are the GPUs whose health it knew then.

    `saved_at` is in seconds since 1970; None if never saved.
    """

    states: Sequence[HealthState] = ()
    known: frozenset[str] = frozenset()
    saved_at: float | None = None


@dataclass(frozen=True, slots=True)
class NodeState:
    """`faults` are about parts that could not be read, `notes` about the saved health.

    Ledger entries of other boots than `boot_id` are void, if it is known. `ledger_fault` is why a ledger cannot be
    read.
    """

    records: Sequence[ClaimRecord] = ()
    owned: Sequence[OwnedInstance] = ()
    cleanups: Sequence[PendingCleanup] = ()
    health: SavedHealth = SavedHealth()
    boot_id: str | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    layouts: Sequence[GpuLayout] = ()
    ledger_fault: str | None = None
    maintenances: Sequence[Maintenance] = ()

    @property
    def known_records(self) -> list[ClaimRecord]:
        """Records of claims, and of ended claims whose cleanup is pending."""
        return [*self.records, *(one.record for one in self.cleanups)]

    def leaving(self, gpu_uuid: str) -> set[tuple[int, int]]:
        steps = (step for one in self.cleanups for step in one.steps)
        return {step.slot for step in steps if isinstance(step, CreateMig) and step.gpu_uuid == gpu_uuid}

    def instance_ids(self, inventory: Inventory) -> Mapping[str, tuple[str, int, int]]:
        """Return GPU UUID, GPU instance ID and compute instance ID of each MIG device, by name."""
        there = {
            mig_device_name(inventory.gpu_names[gpu.uuid], mig): (
                gpu.uuid,
                mig.gpu_instance_id,
                mig.compute_instance_id,
            )
            for gpu in inventory.gpus
            for mig in gpu.mig_devices
        }
        made = {
            entry.device: (entry.gpu_uuid, entry.gpu_instance_id, entry.compute_instance_id)
            for entry in self.owned
            if entry.gpu_instance_id is not None and entry.compute_instance_id is not None
        }
        return {**made, **there}
