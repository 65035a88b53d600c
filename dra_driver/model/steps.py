"""The steps that prepare a claim, one class for each kind.

A step is data: it names what to do, and says everything about itself that needs neither a GPU nor a file. A class in
its feature does it, undoes it and reads it back (`app/steps.py` makes them). A new kind of step is a class here that is
added to `Step`, and such a class in its feature; mypy and the tests ask for the rest.
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
    """What each kind of step says about itself. Not an `ABC`, because mypy checks this, and `isinstance` stays fast."""

    __slots__ = ()

    @property
    @abstractmethod
    def tag(self) -> str:
        """The step's name in records, ledgers and metrics. It never changes."""

    @property
    @abstractmethod
    def doing(self) -> str:
        """The step's action, for messages such as `the MPS daemon start takes too long`."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """What the step sets up, as `gpu-dra-driver claims` shows it."""

    @property
    @abstractmethod
    def gpus(self) -> frozenset[str]:
        """The UUIDs of the GPUs in whose lanes the step runs."""


class FileStep(AnyStep):
    """A step that only writes files of the claim. Its undo removes them with the claim's record."""

    __slots__ = ()
    gpus = frozenset[str]()


class KeptStep(AnyStep):
    """A step that changes a GPU and is undone in the GPU's lane. The ledger has it from before it is done until it is
    undone; after the claim has ended, it is pending cleanup.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def cleanup(self) -> str:
        """The kind of the pending cleanup, in metrics, taints and commands."""

    @property
    @abstractmethod
    def undoing(self) -> str:
        """The undo as a text, such as `destroy MIG device gpu-1-mig-1g10gb-19-0`."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What a person can do while the undo is pending."""

    @property
    @abstractmethod
    def sets(self) -> frozenset[str]:
        """The devices or GPUs that the step sets. Another claim's step of the same kind on one of them keeps this one
        from being undone.
        """

    @property
    @abstractmethod
    def withholds(self) -> frozenset[str]:
        """The names of devices, or UUIDs of GPUs with all their devices, that no claim gets before the undo; a Prepare
        that needs their GPU undoes the step first. Empty if claims can use the GPU regardless.
        """

    @property
    @abstractmethod
    def devices(self) -> tuple[HeldDevice, ...]:
        """The devices that exist, or are bound, because of the step, for a claim whose record is gone."""

    @property
    @abstractmethod
    def outlives_reboot(self) -> bool:
        """Whether a reboot leaves something to undo."""


@dataclass(frozen=True, slots=True)
class SettingStep(KeptStep):
    """A step that sets one value on a GPU (`journal/setting_steps.py`)."""

    devices, outlives_reboot = (), False

    gpu_uuid: str

    @property
    @abstractmethod
    def value(self) -> Any:
        """The value to set. A setting that the NVIDIA driver reports has an int."""

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset({self.gpu_uuid})

    sets = gpus


@dataclass(frozen=True, slots=True)
class SetTimeSlice(SettingStep):
    """Sets the length of a GPU's time slices to level `interval` (1 short, 2 medium, 3 long).

    Undo: restores the default, unless another claim on this GPU has the same step.
    """

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
    """Sets the power limit of a GPU to `limit_w` watts.

    Undo: restores the limit that GPUs without claims have, unless another claim on this GPU has the same step.
    """

    tag, shown, doing, cleanup = "set_power_limit", "power limit", "the power limit change", "power-limit"
    remedy = "gpu-dra-driver retries; check that the GPU answers `nvidia-smi -q -d POWER,CLOCK` on the node"

    limit_w: int

    @property
    def value(self) -> int:
        """The limit in milliwatts, as in NVML."""
        return self.limit_w * 1000

    @property
    def text(self) -> str:
        """The limit, for people."""
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
    """Locks the graphics or memory clock of a GPU to a range in MHz.

    Undo: removes the lock, unless another claim on this GPU has the same step.
    """

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
        """The limit, for people."""
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
"""The steps that make a GPU slower for a claim (`power`)."""


@dataclass(frozen=True, slots=True)
class RunMps(KeptStep):
    """Runs the MPS control daemon of a device. Undo: stops the daemon, unless another claim uses it. A reboot does not
    remove the directory of the daemon.
    """

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
    """Creates the MIG device with this profile and placement, unless this plugin has already created it.

    Undo: destroys the device, unless another claim uses it. If no instance is left and this plugin enabled MIG
    mode, also disables MIG mode.
    """

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
        """Like `GpuInstance.slot`."""
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        """The GPU."""
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
    """Disables MIG mode so that the GPU can be used whole. Undo: nothing."""

    tag, shown, doing = "leave_mig_mode", "MIG mode", "the MIG mode change"

    gpu_uuid: str
    pci_bus_id: str | None

    @property
    def gpu(self) -> GpuAddress:
        """The GPU."""
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset({self.gpu_uuid})


@dataclass(frozen=True, slots=True)
class BindVfio(KeptStep):
    """Binds the functions of a GPU's card to a vfio driver, so that a virtual machine can get the card.

    Undo: restores the earlier drivers, unless a virtual machine still uses the card.
    """

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
    """Takes GPUs out of service: once no other claim uses them, closes NVML in every process of this plugin on the
    node, for at most `timeout_s` seconds. `policy` says whether Prepare waits for the other claims or fails.

    While the claim's record exists, the GPUs' devices are not published. Undo: allows NVML to be opened again.
    """

    tag, shown, doing = "start_maintenance", "maintenance", "the NVML shutdown for maintenance"

    gpu_uuids: tuple[str, ...]
    policy: MaintenancePolicy
    timeout_s: int

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(self.gpu_uuids)


EVERY_METADATA_VERSION = ("v1beta1", "v1alpha1")
"""All format versions of device metadata, newest first."""


@dataclass(frozen=True, slots=True)
class WriteDeviceMetadata(FileStep):
    """Writes the files that list the claim's devices for its containers, in these format versions, newest
    first.

    Undo: removes the files.
    """

    tag, shown, doing = "write_device_metadata", "device metadata", "the writing of device metadata"

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteCdiSpec(FileStep):
    """Writes the claim's CDI spec file. Undo: removes it."""

    tag, shown, doing = "write_cdi_spec", "CDI spec", "the writing of the CDI spec"


LedgerStep = CreateMig | SetTimeSlice | SetPowerLimit | LockClocks | RunMps | BindVfio
"""The steps that ledgers have, in the order in which a Prepare does them."""
Step = StartMaintenance | LeaveMigMode | LedgerStep | WriteDeviceMetadata | WriteCdiSpec
"""All steps, in the order in which a Prepare does them."""
STEPS: tuple[type[Step], ...] = get_args(Step)
LEDGER_STEPS: tuple[type[LedgerStep], ...] = get_args(LedgerStep)


def maintenance_of(steps: Iterable[Step]) -> StartMaintenance | None:
    """Return the step that takes GPUs out of service; None if the claim is not a maintenance claim."""
    return next((step for step in steps if isinstance(step, StartMaintenance)), None)
