"""The steps that prepare a claim, one class for each kind.

A step is data: what it says about itself needs neither a GPU nor a file. A class in its feature does it,
undoes it and reads it back (`app/steps.py` makes them). For a new kind, add a class here and to `Step`; mypy
and the tests ask for the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, get_args

from dra_driver.model.claim import HeldDevice
from dra_driver.model.dataclass import dataclass
from dra_driver.model.mig import GpuAddress, Placement
from dra_driver.model.mps import MpsDaemonSpec


class AnyStep:
    """Not an `ABC`, because mypy checks this, and `isinstance` stays fast."""

    __slots__ = ()

    @property
    @abstractmethod
    def tag(self) -> str:
        """The name in records, ledgers and metrics. It never changes."""

    @property
    @abstractmethod
    def doing(self) -> str:
        """For messages such as `the MPS daemon start takes too long`."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """In `gpu-dra-driver claims`."""

    @property
    @abstractmethod
    def gpus(self) -> frozenset[str]:
        """The step runs in their lanes."""


class FileStep(AnyStep):
    """Writes only files of the claim, which its undo removes."""

    __slots__ = ()
    gpus = frozenset[str]()


class KeptStep(AnyStep):
    """Changes a GPU and is undone in the GPU's lane. The ledger has it from before it is done until it is
    undone.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def cleanup(self) -> str:
        """In metrics, taints and commands."""

    @property
    @abstractmethod
    def undoing(self) -> str:
        """For example `destroy MIG device gpu-1-mig-1g10gb-19-0`."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What a person can do while the undo is pending."""

    @property
    @abstractmethod
    def sets(self) -> frozenset[str]:
        """The step is not undone while another claim's step of the same kind sets one of these."""

    @property
    @abstractmethod
    def withholds(self) -> frozenset[str]:
        """Devices by name, or all devices of GPUs by UUID, that no claim gets before the undo."""

    @property
    @abstractmethod
    def devices(self) -> tuple[HeldDevice, ...]:
        """What exists, or is bound, because of the step, for a claim whose record is gone."""

    @property
    @abstractmethod
    def outlives_reboot(self) -> bool:
        """Whether a reboot leaves something to undo."""


@dataclass(frozen=True, slots=True)
class SettingStep(KeptStep):
    """Sets one value on a GPU (`journal/setting_steps.py`)."""

    devices, outlives_reboot = (), False

    gpu_uuid: str

    @property
    @abstractmethod
    def value(self) -> Any:
        """An int if the NVIDIA driver reports it."""

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset({self.gpu_uuid})

    sets = gpus


@dataclass(frozen=True, slots=True)
class SetTimeSlice(SettingStep):
    """Level 1 is short, 2 medium, 3 long."""

    tag, shown, doing, cleanup = "set_time_slice", "time slice", "the time slice change", "time-slice"
    remedy = "gpu-dra-driver retries; check that nvidia-smi works on the node"
    withholds = frozenset[str]()

    interval: int

    @property
    def value(self) -> int:
        return self.interval

    @property
    def undoing(self) -> str:
        return f"reset the time slice of GPU {self.gpu_uuid}"


@dataclass(frozen=True, slots=True)
class SetPowerLimit(SettingStep):
    """Undo: the limit that GPUs without claims have."""

    tag, shown, doing, cleanup = "set_power_limit", "power limit", "the power limit change", "power-limit"
    remedy = "gpu-dra-driver retries; check that the GPU answers `nvidia-smi -q -d POWER,CLOCK` on the node"

    limit_w: int

    @property
    def value(self) -> int:
        """Milliwatts, as in NVML."""
        return self.limit_w * 1000

    @property
    def text(self) -> str:
        return f"{self.limit_w} W"

    @property
    def withholds(self) -> frozenset[str]:
        return self.gpus

    @property
    def undoing(self) -> str:
        return f"restore the power limit of GPU {self.gpu_uuid}"


ClockDomain = Literal["graphics", "memory"]


@dataclass(frozen=True, slots=True)
class LockClocks(SettingStep):
    tag, shown, doing, cleanup = "lock_clocks", "locked clocks", "the locking of clocks", "clocks"
    remedy = SetPowerLimit.remedy

    domain: ClockDomain
    least_mhz: int
    most_mhz: int

    @property
    def value(self) -> tuple[int, int]:
        return self.least_mhz, self.most_mhz

    @property
    def text(self) -> str:
        return f"{self.domain} clock {self.least_mhz} to {self.most_mhz} MHz"

    @property
    def sets(self) -> frozenset[str]:
        return frozenset({f"{self.gpu_uuid} {self.domain}"})

    @property
    def withholds(self) -> frozenset[str]:
        return self.gpus

    @property
    def undoing(self) -> str:
        return f"unlock the {self.domain} clock of GPU {self.gpu_uuid}"


Limit = SetPowerLimit | LockClocks
"""These make a GPU slower for a claim (`power`)."""


@dataclass(frozen=True, slots=True)
class RunMps(KeptStep):
    """A reboot does not remove the daemon's directory."""

    tag, shown, doing, cleanup = "run_mps", "MPS daemon", "the MPS daemon start", "mps"
    remedy = (
        "gpu-dra-driver retries; check that the MPS host (DaemonSet gpu-dra-driver-mps) and nvidia-smi work on the "
        "node"
    )
    outlives_reboot = True

    spec: MpsDaemonSpec

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(self.spec.gpu_uuids)

    @property
    def undoing(self) -> str:
        noun = "device" if len(self.spec.devices) == 1 else "devices"
        return f"stop the MPS daemon of {noun} {', '.join(self.spec.devices)}"

    @property
    def sets(self) -> frozenset[str]:
        # A device has at most one MPS daemon, whatever other GPUs the daemon serves.
        return frozenset(self.spec.devices)

    @property
    def withholds(self) -> frozenset[str]:
        return frozenset({self.spec.device}) if self.spec.kind == "mig" else self.gpus

    @property
    def devices(self) -> tuple[HeldDevice, ...]:
        named = zip(self.spec.devices, self.spec.gpu_uuids, strict=True)
        return tuple(
            HeldDevice(device, self.spec.kind, self.spec.uuid, gpu_uuid) for device, gpu_uuid in named
        )


@dataclass(frozen=True, slots=True)
class CreateMig(KeptStep):
    """Undo: destroys the device, and disables MIG mode if no instance is left and this plugin enabled it."""

    tag, shown, doing, cleanup = "create_mig", "MIG device", "the MIG device creation", "mig-device"
    remedy = "gpu-dra-driver retries when the GPU is free"
    outlives_reboot = False

    device: str
    gpu_uuid: str
    pci_bus_id: str | None
    profile_id: int
    profile_name: str
    placement: Placement

    @property
    def slot(self) -> tuple[int, int]:
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset({self.gpu_uuid})

    @property
    def undoing(self) -> str:
        return f"destroy MIG device {self.device}"

    @property
    def sets(self) -> frozenset[str]:
        return frozenset({self.device})

    withholds = sets

    @property
    def devices(self) -> tuple[HeldDevice, ...]:
        return (HeldDevice(self.device, "mig", "", self.gpu_uuid, placement=self.placement),)


@dataclass(frozen=True, slots=True)
class LeaveMigMode(AnyStep):
    """Lets the GPU be used whole. Undo: nothing."""

    tag, shown, doing = "leave_mig_mode", "MIG mode", "the MIG mode change"

    gpu_uuid: str
    pci_bus_id: str | None

    @property
    def gpu(self) -> GpuAddress:
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset({self.gpu_uuid})


@dataclass(frozen=True, slots=True)
class BindVfio(KeptStep):
    """Undo: restores the earlier drivers, unless a virtual machine still uses the card."""

    tag, shown, doing, cleanup = "bind_vfio", "vfio", "the vfio binding", "vfio"
    remedy = "gpu-dra-driver retries"
    outlives_reboot = False

    device: str
    gpu_uuid: str
    pci_bus_id: str
    vfio_driver: str

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset({self.gpu_uuid})

    withholds = gpus

    @property
    def undoing(self) -> str:
        return f"return GPU {self.gpu_uuid} ({self.pci_bus_id}) to the NVIDIA driver"

    @property
    def sets(self) -> frozenset[str]:
        return frozenset({self.pci_bus_id})

    @property
    def devices(self) -> tuple[HeldDevice, ...]:
        return (HeldDevice(self.device, "vfio", "", self.gpu_uuid),)


MaintenancePolicy = Literal["Wait", "Refuse"]


@dataclass(frozen=True, slots=True)
class StartMaintenance(AnyStep):
    """Once no other claim uses the GPUs, closes NVML in every process of this plugin on the node, for at most
    `timeout_s`. `policy`: Prepare waits for the other claims, or fails. While the record exists, the GPUs are
    not published.
    """

    tag, shown, doing = "start_maintenance", "maintenance", "the NVML shutdown for maintenance"

    gpu_uuids: tuple[str, ...]
    policy: MaintenancePolicy
    timeout_s: int

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(self.gpu_uuids)


EVERY_METADATA_VERSION = ("v1beta1", "v1alpha1")
"""Newest first."""


@dataclass(frozen=True, slots=True)
class WriteDeviceMetadata(FileStep):
    tag, shown, doing = "write_device_metadata", "device metadata", "the writing of device metadata"

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteCdiSpec(FileStep):
    """Writes the claim's CDI spec."""

    tag, shown, doing = "write_cdi_spec", "CDI spec", "the writing of the CDI spec"


LedgerStep = CreateMig | SetTimeSlice | SetPowerLimit | LockClocks | RunMps | BindVfio
"""In the order of a Prepare."""
Step = StartMaintenance | LeaveMigMode | LedgerStep | WriteDeviceMetadata | WriteCdiSpec
"""In the order of a Prepare."""
STEPS: tuple[type[Step], ...] = get_args(Step)
LEDGER_STEPS: tuple[type[LedgerStep], ...] = get_args(LedgerStep)


def maintenance_of(steps: Iterable[Step]) -> StartMaintenance | None:
    return next((step for step in steps if isinstance(step, StartMaintenance)), None)
