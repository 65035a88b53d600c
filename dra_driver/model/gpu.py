"""A physical GPU as discovered, and how busy it is. Every value but the UUID may be unknown; it is then None, never
0."""

from __future__ import annotations

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
    """A process that NVML lists on a GPU. `gpu_instance_id` is set in MIG mode; memory is in bytes, None if it is not
    told; the name is empty for a process of another PID namespace."""

    pid: int
    name: str
    memory_bytes: int | None = None
    gpu_instance_id: int | None = None


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
