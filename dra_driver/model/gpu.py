"""A physical GPU as discovered, and how busy it is; and a GPU as a PCI function that a virtual machine can get (VFIO).

Every value of a GPU but the UUID may be unknown; it is then None, never 0.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dra_driver.model.mig import MigDevice, Partitioning


@dataclass(frozen=True, slots=True)
class Fabric:
    """Membership of a GPU in a multi-node NVLink fabric. `cluster_uuid` is in canonical text form.

    Two GPUs of a cluster that have a clique in common reach each other over NVLink. With one of `cliques` programs use
    pointers into the other GPU's memory; with one of `endpoint_cliques` they use logical endpoints. Both are in
    ascending order, and the numbers of one kind mean nothing in the other. Cliques for multicast are not among them.
    """

    cluster_uuid: str
    cliques: tuple[int, ...]
    endpoint_cliques: tuple[int, ...] = ()

    @property
    def clique_id(self) -> int | None:
        """The clique that NVIDIA's older interfaces and its node label name."""
        return self.cliques[0] if self.cliques else None

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that the GPU is in, by pointers if possible: `clusterUUID.cliqueId`, the form of NVIDIA's node
        label, or `clusterUUID.endpoint-cliqueId`."""
        if self.cliques:
            return tuple(f"{self.cluster_uuid}.{clique}" for clique in self.cliques)
        return tuple(f"{self.cluster_uuid}.endpoint-{clique}" for clique in self.endpoint_cliques)


@dataclass(frozen=True, slots=True)
class UnreadyFabric:
    """A GPU has an NVLink fabric and is not registered with it yet (`pending`), could not be registered (`broken`), or
    NVML does not report (`unknown`).

    `text` is what NVML says of it. `since` is when the GPU was first found so, in seconds since 1970; it does not count
    when two values are compared.
    """

    state: Literal["pending", "broken", "unknown"]
    text: str
    since: int = field(default=0, compare=False)


FabricRegistration = Fabric | UnreadyFabric | None
"""With a multi-node NVLink fabric. None: the GPU has no fabric, or one that ends at its board."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    `index` is NVML's and moves when a card is drained; `minor` is the N of /dev/nvidiaN.
    `pci_bus_id` is in sysfs form; `memory_bytes` is the total; versions are (major, minor).
    `nvlink_links` counts active links; `mig_enabled` means that the current mode is on; `multiprocessors`
    counts all of the GPU, also where MIG mode leaves some out. `partitioning` is set where MIG devices are made
    on demand; such a GPU is not counted as one in MIG mode, whatever its mode is at the moment. `memory_numa_node` is
    the NUMA node of the host that the GPU's own memory is, where that is so. At most one of `fabric` and
    `unready_fabric` is set.
    """

    uuid: str
    index: int | None = None
    minor: int | None = None
    pci_bus_id: str | None = None
    product_name: str | None = None
    brand: str | None = None
    architecture: str | None = None
    cuda_compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    addressing_mode: str | None = None
    pcie_root: str | None = None
    numa_node: int | None = None
    nvlink_links: int | None = None
    fabric: Fabric | None = None
    unready_fabric: UnreadyFabric | None = None
    mig_capable: bool | None = None
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()
    multiprocessors: int | None = None
    partitioning: Partitioning | None = None
    memory_numa_node: int | None = None

    @property
    def fabric_registration(self) -> FabricRegistration:
        """With the multi-node NVLink fabric, whether it is complete or not."""
        return self.fabric or self.unready_fabric

    @property
    def can_be_whole(self) -> bool:
        """Whether the GPU is out of MIG mode, or leaves it for a claim that wants it whole."""
        return not self.mig_enabled or (self.partitioning is not None and self.partitioning.offers_whole)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that NVML lists on a GPU.

    `gpu_instance_id` is set in MIG mode. Memory is in bytes. `utilisation_percent` is the part of the last seconds in
    which a kernel of the process ran. Each is None where NVML does not report it. The name is empty for a process of
    another PID namespace.
    """

    pid: int
    name: str
    memory_bytes: int | None = None
    gpu_instance_id: int | None = None
    utilisation_percent: int | None = None

    @property
    def program(self) -> str:
        """Without the path and the arguments: the program in the pod chooses its name."""
        return self.name.partition(" ")[0].rpartition("/")[2]

    @property
    def is_mps_server(self) -> bool:
        """Whether it serves the clients of MPS, which NVML lists beside it."""
        return self.program == "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class ProcessOrigin:
    """Where a process runs, by its cgroup: in a pod or another container, in a service or login session of the host, or
    unknown, as for one that has ended. `pod_uid` is None outside of pods."""

    where: Literal["container", "host", "unknown"] = "unknown"
    pod_uid: str | None = None


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """How busy a GPU or a MIG device is at one moment; a value that NVML does not report is None.

    Memory is in bytes, without the memory that the NVIDIA driver reserves. `utilisation_percent` is the part of the
    last sample period in which a kernel ran; no GPU in MIG mode has it. That of a MIG device is since the look before.
    """

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One look at a GPU: its own load, the loads of MIG devices by UUID, and all processes on it; None if this process
    cannot see those of others."""

    load: GpuLoad
    mig: Mapping[str, GpuLoad] = field(default_factory=dict)
    processes: Sequence[GpuProcess] | None = ()


VFIO_PCI = "vfio-pci"


def is_vfio(driver: str | None) -> bool:
    """Whether a kernel driver is one for virtual machines, by its name: those for certain GPUs have longer ones."""
    return "vfio" in (driver or "")


def uuid_of_bus_id(bus_id: str) -> str:
    """The UUID by which a card is known whoever has it: that of its bus ID as a name of the DNS."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, bus_id))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a PCI function, with all functions of its IOMMU group that go with it.

    Bus IDs are in sysfs form, such as `0000:1b:00.0`. `gpu_uuid` is what lanes, records and locks know the card by:
    NVML's UUID where that is known, else a UUID made of the bus ID. `functions` are those of the group in bus order,
    the GPU included, bridges left out. `vfio_driver` is the kernel driver for it: `vfio-pci`, or the variant that the
    kernel names for this GPU; `driver` is the one that has it now, None if none has. `by_us` says that this plugin
    gave it to its vfio driver in this boot. `addressable_memory` is in bytes: the 64-bit memory regions together,
    rounded up to a power of two. `problem` is one sentence on why no virtual machine can get the card; such a card is
    not offered.
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
        """Whether a vfio driver has the card."""
        return self.driver in (self.vfio_driver, VFIO_PCI)


@dataclass(frozen=True, slots=True)
class FunctionBefore:
    """A PCI function of a card with the kernel driver and the `driver_override` that it had, None for none."""

    bus_id: str
    driver: str | None
    override: str | None = None


@dataclass(frozen=True, slots=True)
class OwnedCard:
    """What the ledger says of a card that this plugin bound to a vfio driver in boot `boot_id`, or is about to.

    `functions` are those of its IOMMU group in bus order. `persistence` is the persistence mode that the GPU had, None
    where it has none. `product_name` is what only the NVIDIA driver knows.
    """

    gpu_uuid: str
    pci_bus_id: str
    boot_id: str
    functions: tuple[FunctionBefore, ...]
    persistence: bool | None
    product_name: str | None = None
