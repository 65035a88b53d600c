"""The steps of a Prepare, each with an undo that may run any number of times.

A step is data: it names what to do and everything that its undo needs. So a record of the steps is enough to take a
claim back without API server, inventory or NVML.
"""

from __future__ import annotations

from dataclasses import dataclass

from dra_driver.model.mig import GpuAddress, Placement
from dra_driver.model.mps import MpsDaemonSpec


@dataclass(frozen=True, slots=True)
class SetTimeSlice:
    """Set the length of a GPU's time slices to level `interval` (1 short, 2 medium, 3 long).

    Undo: back to the default, unless another claim on this GPU wants the same.
    """

    gpu_uuid: str
    interval: int


@dataclass(frozen=True, slots=True)
class RunMps:
    """Run the MPS control daemon of a device. Undo: stop it, unless another claim on this device uses it."""

    spec: MpsDaemonSpec


@dataclass(frozen=True, slots=True)
class CreateMig:
    """Make the MIG device of a profile at a placement of a GPU, unless this plugin has made it already.

    Undo: destroy it, unless another claim uses the same device; then leave MIG mode if this plugin switched it on and
    no instance is left.
    """

    device: str
    gpu_uuid: str
    pci_bus_id: str | None
    profile_id: int
    profile_name: str
    placement: Placement

    @property
    def slot(self) -> tuple[int, int]:
        """As `GpuInstance.slot`."""
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        """The GPU."""
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)


@dataclass(frozen=True, slots=True)
class LeaveMigMode:
    """Switch a GPU out of MIG mode, so that it can be used whole. Undo: nothing."""

    gpu_uuid: str
    pci_bus_id: str | None

    @property
    def gpu(self) -> GpuAddress:
        """The GPU."""
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)


@dataclass(frozen=True, slots=True)
class BindVfio:
    """Bind the functions of a GPU's card to a vfio driver, so that a virtual machine can get it.

    Undo: back to the drivers that they had, unless a virtual machine still has the card.
    """

    device: str
    gpu_uuid: str
    pci_bus_id: str
    vfio_driver: str


EVERY_METADATA_VERSION = ("v1beta1", "v1alpha1")
"""All versions of the format of device metadata, newest first."""


@dataclass(frozen=True, slots=True)
class WriteDeviceMetadata:
    """Write the files that tell the claim's containers which devices they have, in these versions of their format,
    newest first. Undo: remove them."""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteCdiSpec:
    """Write the claim's CDI spec file. Undo: remove it."""


STEP_TEXTS = {
    LeaveMigMode: "the switch of the MIG mode",
    CreateMig: "the creation of a MIG device",
    SetTimeSlice: "the setting of the time slice",
    RunMps: "the start of the MPS daemon",
    BindVfio: "the binding to vfio",
    WriteDeviceMetadata: "the writing of device metadata",
    WriteCdiSpec: "the writing of the CDI spec",
}
"""What each step does, for people."""

Step = LeaveMigMode | CreateMig | SetTimeSlice | RunMps | BindVfio | WriteDeviceMetadata | WriteCdiSpec


def writes_files(step: Step) -> bool:
    """Whether the step changes files only, and no GPU."""
    return isinstance(step, WriteCdiSpec | WriteDeviceMetadata)
