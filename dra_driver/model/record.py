"""A claim's record: its devices, and the steps that prepared them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from dra_driver.model.claim import AllocatedClaim, ClaimRef, HeldDevice
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.steps import BindVfio, StartMaintenance, Step, maintenance_of

Phase = Literal["preparing", "prepared"]


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """`claim` has our part of the allocation, enough to prepare again without the API server. `steps` may
    have had an effect, in execution order, in boot `boot_id`: kernel state does not survive it.
    """

    claim: AllocatedClaim
    phase: Phase
    boot_id: str
    devices: tuple[HeldDevice, ...]
    steps: tuple[Step, ...]
    prepared_at: str | None = None

    @property
    def ref(self) -> ClaimRef:
        return self.claim.ref

    def as_of(self, boot_id: str) -> ClaimRecord:
        """Return the record for a boot. A reboot undoes the steps."""
        is_void = self.phase == "prepared" and self.boot_id != boot_id
        return replace(self, phase="preparing", prepared_at=None) if is_void else self

    def names_the_same(self, other: ClaimRecord | None) -> bool:
        """Whether devices, steps and boot are the same, regardless of progress."""
        return other is not None and self == replace(other, phase=self.phase, prepared_at=self.prepared_at)

    def is_within(self, devices: Collection[str]) -> bool:
        return all(held.device in devices for held in self.devices)

    @property
    def gpu_uuids(self) -> frozenset[str]:
        return frozenset(held.gpu_uuid for held in self.devices)

    @property
    def maintenance(self) -> StartMaintenance | None:
        return maintenance_of(self.steps)


def bindings(records: Iterable[ClaimRecord], boot_id: str | None) -> list[BindVfio]:
    steps = (step for record in records if record.boot_id == boot_id for step in record.steps)
    return [step for step in steps if isinstance(step, BindVfio)]
