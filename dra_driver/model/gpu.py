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
    """Membership of a GPU in a multi-node NVLink fabric. `cluster_uuid` is in canonical text form.

    Two GPUs of a cluster that share a clique reach each other over NVLink. If they share one of `cliques`,
    programs can use pointers into the other GPU's memory; if they share one of `endpoint_cliques`, programs use
    logical endpoints. Both tuples are in ascending order, and each has its own numbering. Multicast cliques are
    not included.
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
    """A GPU whose registration with its NVLink fabric is `pending`, `broken`, or `unknown` because NVML does
    not report it.

    `text` is NVML's description. `since` is when the state began, in seconds since 1970; equality ignores it.
    """

    state: Literal["pending", "broken", "unknown"]
    text: str
    since: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Chassis:
    """Where a GPU is in a rack: the serial number of the chassis, the slot of the GPU's tray among all slots, and the
    index of the tray among the compute trays.
    """

    serial: str
    slot: int
    tray: int


FabricRegistration = Fabric | UnreadyFabric | None
"""Registration with a multi-node NVLink fabric; None if there is no fabric or the fabric does not leave the board."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How NVML reports a field of `Gpu`.

    `what` names the query in faults. `call` is the name of the function in NVML's Python binding, and `to` converts its
    result; without a `call`, `nvml.readings` determines the field, perhaps with several queries. If NVML does not
    support the call, the field is `absent`. If a query of the field fails, the field keeps its last known value. A
    field that is `kept_current` is read every two seconds, and a change is published at once, so its call must be fast.
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
    """Return a field of Gpu that NVML reports; the arguments are those of Reading."""
    names = (what,) if isinstance(what, str) else what
    return field(default=default, metadata={"reading": Reading(names, call, to, **more)})


def _addressing_mode(value: Any) -> str | None:
    mode = getattr(value, "value", value)
    return _ADDRESSING_MODES.get(mode) if isinstance(mode, int) else None


def whole_watts(limits: Sequence[int]) -> tuple[int, int]:
    """Return the range of whole watts within limits in milliwatts."""
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

    `index` is NVML's, and changes when a card is drained; `minor` is the N of /dev/nvidiaN. `pci_bus_id` is
    in sysfs form; `memory_bytes` is the total; versions are (major, minor). `nvlink_links` counts active
    links; `mig_enabled` is the current mode; `multiprocessors` counts all of the GPU's multiprocessors, even those
    that MIG mode does not use. `partitioning` is set if MIG devices are created on demand; once such a GPU is
    published, `mig_enabled` ignores a mode that this plugin enabled. `memory_numa_node` is the NUMA node of the GPU's
    own memory, if the host has such a node. `power_limits_w` and the clocks are the lowest and the highest value that
    can be set. At most one of `fabric` and `unready_fabric` is set. `persistence` is whether persistence mode is on.
    `module_id` is the GPU's number on its board, which Fabric Manager also uses.
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
        """The registration with the multi-node NVLink fabric, complete or not."""
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
    """A process that NVML lists on a GPU.

    `gpu_instance_id` is set in MIG mode. Memory is in bytes. `utilisation_percent` is the share of the last
    seconds in which a kernel of the process ran. Values that NVML does not report are None. The name is empty
    for a process of another PID namespace.
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
    """Where a process runs, according to its cgroup: in a pod or other container, in a host service or login
    session, or unknown, for example after it exited. `pod_uid` is None outside of pods.
    """

    where: Literal["container", "host", "unknown"] = "unknown"
    pod_uid: str | None = None


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """The load of a GPU or MIG device at one moment; values that NVML does not report are None.

    Memory is in bytes, without the part reserved by the NVIDIA driver. `utilisation_percent` is the share of
    the last sample period in which a kernel ran; GPUs in MIG mode do not have it. For a MIG device the period
    is the time since the previous reading.
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
    """Counters of a physical GPU since the NVIDIA driver was loaded, its clocks, and why it reduces them; the power
    limit that is set, of which less may be enforced. Values that NVML does not report are None.

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
    """One reading of a GPU: its load, the loads of MIG devices by UUID, all its processes, and its meters.

    `processes` is None outside the host's PID namespace, where NVML hides the processes of other containers.
    """

    load: GpuLoad
    mig: Mapping[str, GpuLoad] = field(default_factory=dict)
    processes: Sequence[GpuProcess] | None = ()
    meters: GpuMeters = field(default_factory=GpuMeters)


@dataclass(frozen=True, slots=True)
class GpuMeasure:
    """A reading of a GPU for the receipts of claims; values that NVML does not report are None.

    `at` is in seconds since 1970. `busy` has NVML's samples since the previous reading, oldest first: the end of each
    sample, and the percentage of time in which a kernel ran. `mig` has the loads of MIG devices by UUID.
    """

    at: float
    energy_j: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    busy: Sequence[tuple[float, float]] | None = None
    mig: Mapping[str, GpuLoad] = field(default_factory=dict)


VFIO_PCI = "vfio-pci"


def is_vfio(driver: str | None) -> bool:
    """Whether a kernel driver is a vfio driver, by its name: vfio-pci, or the longer name of a variant for certain
    GPUs.
    """
    return "vfio" in (driver or "")


def uuid_of_bus_id(bus_id: str) -> str:
    """Return a UUID of a card that stays the same under every driver: UUIDv5 of the bus ID in the DNS namespace."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, bus_id))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a PCI function, with all functions of its IOMMU group.

    Bus IDs are in sysfs form, such as `0000:1b:00.0`. `gpu_uuid` identifies the card in lanes, records and
    locks: NVML's UUID if known, else a UUID made from the bus ID. `functions` are the group's functions in bus
    order, including the GPU but no bridges. `vfio_driver` is the matching kernel driver: `vfio-pci`, or the
    variant that the kernel names for this GPU; `driver` is the current driver, None if unbound. `by_us` is set
    if this plugin bound the card to vfio in this boot, or is about to. `addressable_memory` is the total size of the
    64-bit memory regions in bytes, rounded up to a power of two. `problem` says in one sentence why no virtual machine
    can get the card; such a card is not published.
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
        """Whether the card is bound to a vfio driver."""
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

    `functions` are those of the card's IOMMU group in bus order. `persistence` is the earlier persistence mode,
    None if unsupported or unknown. `product_name` is kept because only the NVIDIA driver can report it.
    """

    gpu_uuid: str
    pci_bus_id: str
    boot_id: str
    functions: tuple[FunctionBefore, ...]
    persistence: bool | None
    product_name: str | None = None


@dataclass(frozen=True, slots=True)
class SettingBefore:
    """The ledger's entry for the value that a setting of a GPU had before this plugin changed it in boot `boot_id`.

    `setting` is the tag of the step that sets it.
    """

    gpu_uuid: str
    boot_id: str
    setting: str
    value: int
