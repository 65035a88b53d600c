"""A claim's record on this node: its devices, and the steps that prepared them.

A step is data: it names what to do. The ledger of each GPU (`journal/ledger.py`) records what a step changed on
the GPU, and what its undo needs. So Unprepare needs only files: it removes the claim's files and record, and the
cleaner then undoes everything in the ledgers that no record needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.host import HostDevice, ImexChannels
from dra_driver.model.mig import GpuAddress, Placement
from dra_driver.model.mps import MpsDaemonSpec, SharingMode


@dataclass(frozen=True, slots=True)
class SetTimeSlice:
    """Sets the length of a GPU's time slices to level `interval` (1 short, 2 medium, 3 long).

    Undo: restores the default, unless another claim on this GPU has the same step.
    """

    gpu_uuid: str
    interval: int


@dataclass(frozen=True, slots=True)
class RunMps:
    """Runs the MPS control daemon of a device. Undo: stops the daemon, unless another claim uses it."""

    spec: MpsDaemonSpec


@dataclass(frozen=True, slots=True)
class CreateMig:
    """Creates the MIG device with this profile and placement, unless this plugin has already created it.

    Undo: destroys the device, unless another claim uses it. If no instance is left and this plugin enabled MIG
    mode, also disables MIG mode.
    """

    device: str
    gpu_uuid: str
    pci_bus_id: str | None
    profile_id: int
    profile_name: str
    placement: Placement

    @property
    def slot(self) -> tuple[int, int]:
        """Like `GpuInstance.slot`."""
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)


@dataclass(frozen=True, slots=True)
class LeaveMigMode:
    """Disables MIG mode so that the GPU can be used whole. Undo: nothing."""

    gpu_uuid: str
    pci_bus_id: str | None

    @property
    def gpu(self) -> GpuAddress:
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)


@dataclass(frozen=True, slots=True)
class BindVfio:
    """Binds the functions of a GPU's card to a vfio driver, so that a virtual machine can get the card.

    Undo: restores the earlier drivers, unless a virtual machine still uses the card.
    """

    device: str
    gpu_uuid: str
    pci_bus_id: str
    vfio_driver: str


MaintenancePolicy = Literal["Wait", "Refuse"]


@dataclass(frozen=True, slots=True)
class StartMaintenance:
    """Takes GPUs out of service: once no other claim uses them, closes NVML in every process of this plugin on the
    node, for at most `timeout_s` seconds. `policy` says whether Prepare waits for the other claims or fails.

    While the claim's record exists, the GPUs' devices are not published. Undo: allows NVML to be opened again.
    """

    gpu_uuids: tuple[str, ...]
    policy: MaintenancePolicy
    timeout_s: int


EVERY_METADATA_VERSION = ("v1beta1", "v1alpha1")
"""All format versions of device metadata, newest first."""


@dataclass(frozen=True, slots=True)
class WriteDeviceMetadata:
    """Writes the files that list the claim's devices for its containers, in these format versions, newest
    first.

    Undo: removes the files.
    """

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteCdiSpec:
    """Writes the claim's CDI spec file. Undo: removes it."""


STEP_TEXTS = {
    LeaveMigMode: "the MIG mode change",
    CreateMig: "the MIG device creation",
    SetTimeSlice: "the time slice change",
    RunMps: "the MPS daemon start",
    BindVfio: "the vfio binding",
    StartMaintenance: "the NVML shutdown for maintenance",
    WriteDeviceMetadata: "the writing of device metadata",
    WriteCdiSpec: "the writing of the CDI spec",
}
"""Each step's action, for messages such as `the MPS daemon start takes too long`."""

Step = (
    LeaveMigMode
    | CreateMig
    | SetTimeSlice
    | RunMps
    | BindVfio
    | StartMaintenance
    | WriteDeviceMetadata
    | WriteCdiSpec
)


def writes_files(step: Step) -> bool:
    """Whether the step changes only files, and no GPU."""
    return isinstance(step, WriteCdiSpec | WriteDeviceMetadata)


Phase = Literal["preparing", "prepared"]
DeviceKind = Literal["gpu", "mig", "vfio"]


@dataclass(frozen=True, slots=True)
class HeldDevice:
    """A device that a claim holds. `gpu_uuid` is the physical GPU's UUID, `uuid` the device's own.

    `usage` is how the claim shares the device. A MIG device on demand has an empty `uuid`, because it gets a new
    UUID each time it is created. Only these devices have a `placement`, that of their GPU instance.
    `imex` and `host_devices` are additions for the claim's containers.
    """

    device: str
    kind: DeviceKind
    uuid: str
    gpu_uuid: str
    admin_access: bool = False
    share_id: str | None = None
    usage: SharingMode = None
    placement: Placement | None = None
    imex: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()


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


def maintenance_of(steps: Iterable[Step]) -> StartMaintenance | None:
    """Return the step that takes GPUs out of service; None if the claim is not a maintenance claim."""
    return next((step for step in steps if isinstance(step, StartMaintenance)), None)


def bindings(records: Iterable[ClaimRecord], boot_id: str | None) -> list[BindVfio]:
    """Return the vfio bindings in records of this boot."""
    steps = (step for record in records if record.boot_id == boot_id for step in record.steps)
    return [step for step in steps if isinstance(step, BindVfio)]
