"""A claim's record on this node: its devices, and the steps that prepared them.

The ledger of each GPU (`journal/ledger.py`) records what a step changed on the GPU, and what its undo needs. So
Unprepare needs only files: it removes the claim's files and record, and the cleaner then undoes everything in the
ledgers that no record needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from dra_driver.model.claim import AllocatedClaim, ClaimRef, HeldDevice
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.steps import BindVfio, StartMaintenance, Step, maintenance_of

Phase = Literal["preparing", "prepared"]


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The record file of one claim.

    `claim` holds our part of the allocation, enough to prepare again without the API server. `steps` are the
    steps that may have had an effect, in execution order. `boot_id` is the boot in which they ran: kernel
    state does not survive it.
    """

    claim: AllocatedClaim
    phase: Phase
    boot_id: str
    devices: tuple[HeldDevice, ...]
    steps: tuple[Step, ...]
    prepared_at: str | None = None

    @property
    def ref(self) -> ClaimRef:
        """The claim's namespace, name and UID."""
        return self.claim.ref

    def as_of(self, boot_id: str) -> ClaimRecord:
        """Return the record as it applies in a boot. A reboot undoes the steps, so the claim is no longer
        prepared.
        """
        is_void = self.phase == "prepared" and self.boot_id != boot_id
        return replace(self, phase="preparing", prepared_at=None) if is_void else self

    def names_the_same(self, other: ClaimRecord | None) -> bool:
        """Whether the other record has the same devices and steps in the same boot, regardless of progress."""
        return other is not None and self == replace(other, phase=self.phase, prepared_at=self.prepared_at)

    def is_within(self, devices: Collection[str]) -> bool:
        """Whether the claim holds no devices other than `devices`."""
        return all(held.device in devices for held in self.devices)

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """The UUIDs of the claim's physical GPUs."""
        return frozenset(held.gpu_uuid for held in self.devices)

    @property
    def maintenance(self) -> StartMaintenance | None:
        """The step of a maintenance claim; None for any other claim."""
        return maintenance_of(self.steps)


def bindings(records: Iterable[ClaimRecord], boot_id: str | None) -> list[BindVfio]:
    """Return the vfio bindings in records of this boot."""
    steps = (step for record in records if record.boot_id == boot_id for step in record.steps)
    return [step for step in steps if isinstance(step, BindVfio)]
