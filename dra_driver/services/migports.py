"""What making MIG devices needs of the driver and of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from dra_driver.model.mig import GpuInstance, OwnedInstance, Placement

Where = tuple[str, str | None]
"""A GPU: UUID and PCI bus ID."""

Observe = Callable[[Literal["create", "destroy", "mode-on", "mode-off"], str, float, Exception | None], None]
"""Told what was done with which device, or with the MIG mode of which GPU (its UUID), how many seconds that took, and
the error if it failed."""


class ModeHardware(Protocol):
    """MIG mode as the driver has it. Raises, all: NvmlUnavailableError, DeviceLostError, RetryableError;
    PassingRefusalError where it may work a moment later."""

    def mode(self, gpu_uuid: str, pci_bus_id: str | None) -> tuple[bool, bool] | None:
        """(on now, on after the next reset); None on a GPU without MIG."""

    def set_mode(self, gpu_uuid: str, pci_bus_id: str | None, on: bool) -> None:
        """Switch, in effect when this returns. Raises: DeviceBusyError while a process uses the GPU."""

    def instances(self, gpu_uuid: str, pci_bus_id: str | None) -> tuple[GpuInstance, ...]:
        """Every GPU instance, with or without a compute instance; none while the mode is off."""


class Hardware(ModeHardware, Protocol):
    """GPU instances as the driver has them. Raises as ModeHardware."""

    def create(self, gpu_uuid: str, pci_bus_id: str | None, profile_id: int, placement: Placement) -> int:
        """Make a GPU instance there; its ID. A refusal leaves nothing behind.

        Raises: UnsureOutcomeError where there may be one now.
        """

    def compute_instances(
        self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int
    ) -> tuple[tuple[int, str], ...]:
        """ID and MIG UUID of each compute instance in a GPU instance."""

    def create_compute(self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int) -> tuple[int, str]:
        """Make the compute instance that takes all of a GPU instance; its ID and MIG UUID."""

    def destroy_compute(
        self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int, compute_instance_id: int
    ) -> None:
        """Destroy, if there. Raises: DeviceBusyError that names the processes in it."""

    def destroy(self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int) -> None:
        """Destroy, if there. Raises: DeviceBusyError."""

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> int | None:
        """The N of the GPU's /dev/nvidiaN, which switching the mode may change."""


class ModeLedger(Protocol):
    """Which GPUs we switched to MIG mode. Raises, all: StateError."""

    def mode_owned(self, gpu_uuid: str, boot_id: str) -> bool:
        """Whether we did, in this boot."""

    def own_mode(self, gpu_uuid: str, pci_bus_id: str | None, boot_id: str) -> None:
        """Remember that we do."""

    def disown_mode(self, gpu_uuid: str) -> None:
        """Forget it, if known."""


class Ledger(ModeLedger, Protocol):
    """The instances of ours. Raises, all: StateError."""

    def get(self, device: str) -> OwnedInstance | None:
        """A device's entry."""

    def all(self) -> Mapping[str, OwnedInstance]:
        """Every entry by device."""

    def save(self, entry: OwnedInstance, *, leaving: bool = False) -> None:
        """Write; `leaving` where the last claim wants to be rid of the device but still has a record."""

    def is_leaving(self, device: str) -> bool:
        """Whether the device was saved as leaving."""

    def delete(self, device: str) -> None:
        """Remove, if there."""

    def owned_lately(self, boot_id: str) -> frozenset[tuple[str, int, int]]:
        """GPU UUID, profile ID and start of each instance of ours, and of those that were until just now."""
