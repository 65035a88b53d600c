"""A physical GPU as discovered, its load, and a GPU as a PCI function that a virtual machine can get (VFIO).

Every value of a GPU except its UUID may be unknown; it is then None, never 0.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from dra_driver.model.dataclass import dataclass, field, fields
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.mig import MigDevice, Partitioning


@dataclass(frozen=True, slots=True)
class Fabric:
    """Membership in a multi-node NVLink fabric. `cluster_uuid` is in canonical text form.

    Two GPUs of a cluster that share a clique reach each other over NVLink: with one of `cliques` by pointers into the
    other's memory, with one of `endpoint_cliques` by logical endpoints. Both are in ascending order, each with its own
    numbering, without multicast cliques.
    """

    cluster_uuid: str
    cliques: tuple[int, ...]
    endpoint_cliques: tuple[int, ...] = ()

    @property
    def clique_id(self) -> int | None:
        """The clique that NVIDIA's older interfaces and node label use."""
        return self.cliques[0] if self.cliques else None

    @property
    def domains(self) -> tuple[str, ...]:
        """The GPU's NVLink domains: the domains with pointer access or, if there are none, the endpoint domains.

        The form is `clusterUUID.cliqueId`, as in NVIDIA's node label, or `clusterUUID.endpoint-cliqueId`.
        """
        if self.cliques:
            return tuple(f"{self.cluster_uuid}.{clique}" for clique in self.cliques)
        return tuple(f"{self.cluster_uuid}.endpoint-{clique}" for clique in self.endpoint_cliques)


@dataclass(frozen=True, slots=True)
class UnreadyFabric:
    """A registration that is `pending`, `broken`, or `unknown` because NVML does not report it.

    `text` is NVML's description. Equality ignores `since`, in seconds since 1970.
    """

    state: Literal["pending", "broken", "unknown"]
    text: str
    since: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Chassis:
    """A place in a rack: chassis, slot of the tray among all slots, and index among the compute trays."""

    serial: str
    slot: int
    tray: int


FabricRegistration = Fabric | UnreadyFabric | None
"""Registration with a multi-node NVLink fabric; None if there is no fabric or the fabric does not leave the board."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How NVML reports a field of `Gpu`.

    `what` names the query in faults. `call` is the function of NVML's Python binding, and `to` converts its result;
    without a `call`, `nvml.readings` determines the field. If the call is not supported, the field is `absent`; if it
    fails, the field keeps its last value. A field that is `kept_current` is read every two seconds, so its call must be
    fast.
    """

    what: tuple[str, ...]
    call: str = ""
    to: Callable[[Any], Any] | None = None
    absent: object = None
    kept_current: bool = False


def _read(
    what: str | tuple[str, ...],
    call: str = "",
    to: Callable[[Any], Any] | None = None,
    *,
    default: Any = None,
    **more: Any,
) -> Any:
    names = (what,) if isinstance(what, str) else what
    return field(default=default, metadata={"reading": Reading(names, call, to, **more)})


def _addressing_mode(value: Any) -> str | None:
    mode = getattr(value, "value", value)
    return _ADDRESSING_MODES.get(mode) if isinstance(mode, int) else None


def whole_watts(limits: Sequence[int]) -> tuple[int, int]:
    """Round a range in milliwatts to the whole watts within it."""
    least, most = limits
    return -(-least // 1000), most // 1000


# By NVML's numbers.
_BRANDS: Final = {
    0: "Unknown", 1: "Quadro", 2: "Tesla", 3: "NVS", 4: "Grid", 5: "GeForce", 6: "Titan",
    7: "NvidiaVApps", 8: "NvidiaVPC", 9: "NvidiaVCS", 10: "NvidiaVWS", 11: "NvidiaCloudGaming",
    12: "QuadroRTX", 13: "NvidiaRTX", 14: "Nvidia", 15: "GeForceRTX", 16: "TitanRTX",
}  # fmt: skip
_ARCHITECTURES: Final = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace",
    9: "Hopper", 10: "Blackwell", 11: "DLA", 12: "DLA", 13: "Rubin", 15: "NPU",
}  # fmt: skip
_ADDRESSING_MODES: Final = {0: "None", 1: "HMM", 2: "ATS"}
_MIG_MODE: Final = ("MIG mode", "nvmlDeviceGetMigMode")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    `index` is NVML's, and changes when a card is drained; `minor` is the N of /dev/nvidiaN. `pci_bus_id` is in sysfs
    form; versions are (major, minor). `nvlink_links` counts active links; `multiprocessors` also those that MIG mode
    does not use. With `partitioning`, MIG devices are created on demand, and once published, `mig_enabled` ignores a
    mode that this plugin enabled. `memory_numa_node` is that of the GPU's own memory, if the host has one. Limits and
    clocks are the lowest and the highest value that can be set. At most one of `fabric` and `unready_fabric` is set.
    `persistence` is whether persistence mode is on. `module_id` is the number on the board, which Fabric Manager also
    uses.
    """

    uuid: str
    index: int | None = _read("index", "nvmlDeviceGetIndex")
    minor: int | None = _read("minor number", "nvmlDeviceGetMinorNumber", kept_current=True)
    pci_bus_id: str | None = _read("PCI bus ID", "nvmlDeviceGetPciInfo", lambda info: pci_bus_id(info.busId))
    product_name: str | None = _read("product name", "nvmlDeviceGetName")
    brand: str | None = _read("brand", "nvmlDeviceGetBrand", _BRANDS.get)
    architecture: str | None = _read("architecture", "nvmlDeviceGetArchitecture", _ARCHITECTURES.get)
    cuda_compute_capability: tuple[int, int] | None = _read(
        "CUDA compute capability", "nvmlDeviceGetCudaComputeCapability", tuple
    )
    memory_bytes: int | None = _read("memory", "nvmlDeviceGetMemoryInfo", lambda info: int(info.total))
    addressing_mode: str | None = _read("addressing mode", "nvmlDeviceGetAddressingMode", _addressing_mode)
    pcie_root: str | None = None
    numa_node: int | None = None
    nvlink_links: int | None = _read("NVLink")
    fabric: Fabric | None = _read("NVLink fabric")
    unready_fabric: UnreadyFabric | None = _read("NVLink fabric")
    mig_capable: bool | None = _read(*_MIG_MODE, lambda _: True, absent=False, kept_current=True)
    mig_enabled: bool = _read(
        *_MIG_MODE, lambda mode: mode[0] == 1, absent=False, default=False, kept_current=True
    )
    mig_devices: tuple[MigDevice, ...] = _read("MIG mode", default=())
    multiprocessors: int | None = _read(("CUDA compute capability", "number of cores"))
    partitioning: Partitioning | None = None
    memory_numa_node: int | None = _read(("addressing mode", "NUMA node of the memory"))
    power_limits_w: tuple[int, int] | None = _read(
        "power limits", "nvmlDeviceGetPowerManagementLimitConstraints", whole_watts
    )
    power_limit_default_w: int | None = _read(
        "default power limit", "nvmlDeviceGetPowerManagementDefaultLimit", lambda limit: limit // 1000
    )
    graphics_clocks_mhz: tuple[int, int] | None = _read(("memory clocks", "graphics clocks"))
    memory_clocks_mhz: tuple[int, int] | None = _read("memory clocks")
    persistence: bool | None = _read("persistence mode", "nvmlDeviceGetPersistenceMode", bool)
    chassis: Chassis | None = _read("platform")
    module_id: int | None = _read("module ID")

    @property
    def fabric_registration(self) -> FabricRegistration:
        return self.fabric or self.unready_fabric

    @property
    def can_be_whole(self) -> bool:
        """Whether the GPU is not in MIG mode, or leaves it for a claim that needs the whole GPU."""
        return not self.mig_enabled or (self.partitioning is not None and self.partitioning.offers_whole)


READINGS: Final[Mapping[str, Reading]] = {
    one.name: one.metadata["reading"] for one in fields(Gpu) if "reading" in one.metadata
}
"""The fields of a GPU that NVML reports."""
CHANGED_BY_MIG: Final = frozenset({"minor", "mig_capable", "mig_enabled"})
"""The fields that are kept current and change when the GPU's MIG mode changes."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that NVML lists on a GPU; unknown values are None.

    `gpu_instance_id` is set in MIG mode. `utilisation_percent` is the share of the last seconds in which a kernel of
    the process ran. The name is empty for a process of another PID namespace.
    """

    pid: int
    name: str
    memory_bytes: int | None = None
    gpu_instance_id: int | None = None
    utilisation_percent: int | None = None

    @property
    def program(self) -> str:
        """The name without path and arguments. The pod's program can choose any name, so the name proves nothing."""
        return self.name.partition(" ")[0].rpartition("/")[2]

    @property
    def is_mps_server(self) -> bool:
        """Whether the process is an MPS server; NVML lists the server in addition to its clients."""
        return self.program == "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class ProcessOrigin:
    """Where a process runs, by its cgroup. It is unknown, for example, after the process exited. `pod_uid` is None
    outside of pods.
    """

    where: Literal["container", "host", "unknown"] = "unknown"
    pod_uid: str | None = None


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """The load of a GPU or MIG device; unknown values are None.

    Memory is without the part reserved by the NVIDIA driver. `utilisation_percent` is the share of the last sample
    period in which a kernel ran; GPUs in MIG mode do not have it. For a MIG device the period begins at the previous
    reading.
    """

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


Throttle = Literal[
    "sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"
]
"""Why a GPU reduces its clocks; the names are those of nvidia-smi."""
THROTTLES: tuple[Throttle, ...] = get_args(Throttle)


@dataclass(frozen=True, slots=True)
class GpuMeters:
    """Counters since the NVIDIA driver was loaded, clocks, why they are reduced, and the power limit that is set, of
    which less may be enforced. Unknown values are None.

    NVLink counters are the sum of all links, without protocol overhead. NVML's PCIe counters may start over at 0.
    """

    energy_j: float | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    throttles: frozenset[Throttle] | None = None
    power_limit_set_w: float | None = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """`processes` is None outside the host's PID namespace, where NVML hides the processes of other containers. MIG
    devices are by UUID.
    """

    load: GpuLoad
    mig: Mapping[str, GpuLoad] = field(default_factory=dict)
    processes: Sequence[GpuProcess] | None = ()
    meters: GpuMeters = field(default_factory=GpuMeters)


@dataclass(frozen=True, slots=True)
class GpuMeasure:
    """A reading for the receipts of claims; unknown values are None.

    `at` is in seconds since 1970. `busy` has NVML's samples since the previous reading, oldest first: the end of each,
    and the percentage of time in which a kernel ran. MIG devices are by UUID.
    """

    at: float
    energy_j: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    busy: Sequence[tuple[float, float]] | None = None
    mig: Mapping[str, GpuLoad] = field(default_factory=dict)


VFIO_PCI = "vfio-pci"


def is_vfio(driver: str | None) -> bool:
    """Return whether a kernel driver is vfio-pci or, for certain GPUs, a variant of it."""
    return "vfio" in (driver or "")


def uuid_of_bus_id(bus_id: str) -> str:
    """Return a UUID of a card that stays the same under every driver: UUIDv5 of the bus ID in the DNS namespace."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, bus_id))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a PCI function, with all functions of its IOMMU group.

    Bus IDs are in sysfs form, such as `0000:1b:00.0`. `gpu_uuid` identifies the card in lanes, records and locks:
    NVML's UUID if known, else one made from the bus ID. `functions` include the GPU but no bridges, in bus order.
    `vfio_driver` is `vfio-pci`, or the variant that the kernel names for this GPU; `driver` is the current driver.
    `by_us` is set if this plugin bound the card in this boot, or is about to. `addressable_memory` is the size of the
    64-bit memory regions in bytes, rounded up to a power of two. A card with a `problem` is not published.
    """

    bus_id: str
    gpu_uuid: str
    device_id: int
    iommu_group: int
    functions: tuple[str, ...]
    vfio_driver: str
    driver: str | None
    has_iommufd: bool
    by_us: bool = False
    product_name: str | None = None
    addressable_memory: int | None = None
    pcie_root: str | None = None
    numa_node: int | None = None
    problem: str | None = None

    @property
    def is_bound(self) -> bool:
        return self.driver in (self.vfio_driver, VFIO_PCI)


@dataclass(frozen=True, slots=True)
class FunctionBefore:
    """A PCI function of a card, with its earlier kernel driver and `driver_override`; None if it had none."""

    bus_id: str
    driver: str | None
    override: str | None = None


@dataclass(frozen=True, slots=True)
class OwnedCard:
    """The ledger's entry for a card that this plugin bound to vfio in boot `boot_id`, or is about to bind.

    `functions` are in bus order. `persistence` is the earlier mode, None if unsupported or unknown. `product_name` is
    kept because only the NVIDIA driver can report it.
    """

    gpu_uuid: str
    pci_bus_id: str
    boot_id: str
    functions: tuple[FunctionBefore, ...]
    persistence: bool | None
    product_name: str | None = None


@dataclass(frozen=True, slots=True)
class SettingBefore:
    """The ledger's entry for a setting's value before this plugin changed it in boot `boot_id`. `setting` is the tag of
    the step.
    """

    gpu_uuid: str
    boot_id: str
    setting: str
    value: int
