"""What NVML knows of this node, as an Inventory without the host's part (PCIe root, NUMA node)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pynvml

from dra_driver.errors import (
    DeviceLostError,
    DraDriverError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import GpuFingerprint, NvmlFingerprint
from dra_driver.model.inventory import ConfidentialMode, DiscoveryFault, DriverVersions, Inventory
from dra_driver.model.mig import GpuInstance, MigProfile
from dra_driver.nvml.calls import NOT_ANSWERED, GpuWalk, Handle, nvml_errors, supported
from dra_driver.nvml.mig_partitions import PartitionReader
from dra_driver.nvml.mig_reading import Tables, read_mig_devices, read_profiles
from dra_driver.nvml.readings import NOT_GPUS, FaultLog, confidential_mode, read_gpu
from dra_driver.nvml.topology import PeerMemory, read_reachable_pairs

ForeignInstances = Callable[[str, Sequence[GpuInstance]], Sequence[GpuInstance]]
"""Of the instances on a GPU (its UUID) those that someone else made. Raises: StateError."""


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """What one scan keeps for the next. For one thread at a time.

    `known` is each GPU as it was read last, by UUID; `uuids` and `fingerprints` are by NVML index, as of this opening
    of NVML. They are what is known of a GPU that does not answer now.
    """

    partitions: PartitionReader = field(default_factory=PartitionReader)
    peers: PeerMemory = field(default_factory=PeerMemory)
    profiles: Tables[dict[int, MigProfile]] = field(default_factory=lambda: Tables(read_profiles))
    walk: GpuWalk = field(default_factory=GpuWalk)
    known: dict[str, Gpu] = field(default_factory=dict)
    uuids: dict[int, str] = field(default_factory=dict)
    fingerprints: dict[int, GpuFingerprint | None] = field(default_factory=dict)

    def reopened(self) -> None:
        """NVML was initialised again: its numbers may mean other GPUs."""
        self.peers.reopened()
        self.uuids.clear()
        self.fingerprints.clear()


def read_gpus(
    on_demand: Callable[[Gpu], bool] | None,
    memory: ScanMemory,
    foreign_instances: ForeignInstances | None,
) -> Inventory:
    """All GPUs, in PCI order, without NVLink domains. A GPU that does not answer is a fault and holds up no other; it
    is as it was read last, if it was, and so is every value that cannot be read now.

    GPUs that `on_demand` selects (with None: none), and that can be cut, have their partitioning, with all GPU
    instances that exist as `withheld`; their MIG devices are those in the instances that `foreign_instances` returns
    (with None: all). `memory` is the same object in each scan.

    Raises: NvmlUnavailableError if NVML itself does not answer; what `foreign_instances` raises.
    """
    log = FaultLog("NVML")
    versions = _read_versions(log)
    confidential = _confidential_mode(log)
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    found: dict[int, tuple[Handle, Gpu]] = {}
    faults = log.faults
    unread = memory.partitions.unread
    unread.clear()

    def read(index: int) -> tuple[Handle, Gpu, list[DiscoveryFault]]:
        handle, gpu, gpu_faults = read_gpu(index)
        known = memory.known.get(gpu.uuid)
        if gpu.pci_bus_id is None and known is not None:
            raise RetryableError(f"NVML cannot read it: {gpu_faults[0].text}")
        _refuse_unidentified(gpu, () if known else gpu_faults, unread)
        if gpu_faults:
            gpu = _with_known(gpu, gpu_faults, known)
        if on_demand is not None and on_demand(gpu):
            gpu = _partitioned(handle, gpu, versions.driver, memory, gpu_faults)
        if gpu.mig_enabled:
            gpu = _with_mig_devices(handle, gpu, versions.driver, memory, foreign_instances, gpu_faults)
        return handle, gpu, gpu_faults

    answers = memory.walk.each(range(count), read)
    silent: list[Gpu] = []
    for index in range(count):
        try:
            if index not in answers:
                raise RetryableError(NOT_ANSWERED)
            handle, gpu, gpu_faults = answers[index].result()
        except (NvmlUnavailableError, StateError):
            raise
        except DraDriverError as error:
            known = memory.known.get(memory.uuids.get(index, ""))
            if known is None or isinstance(error, DeviceLostError):
                faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
                continue
            faults.append(DiscoveryFault(f"GPU {known.uuid}", f"it is shown as it last answered: {error}"))
            if known.partitioning is not None:
                unread.add(known.uuid)
            silent.append(known)
            continue
        if gpu.architecture in NOT_GPUS:
            continue
        found[index] = (handle, gpu)
        faults += gpu_faults
        memory.known[gpu.uuid], memory.uuids[index] = gpu, gpu.uuid
    gpus = sorted([*(gpu for _, gpu in found.values()), *silent], key=_place)
    pairs, pair_faults = read_reachable_pairs(found, memory.peers, silent, memory.walk)
    faults += pair_faults
    return Inventory(
        versions,
        tuple(gpus),
        faults=tuple(faults),
        unread=frozenset(unread),
        reachable_pairs=pairs,
        confidential_compute=confidential,
    )


def _refuse_unidentified(gpu: Gpu, faults: Iterable[DiscoveryFault], unread: set[str]) -> None:
    """Raises: RetryableError if the architecture of a device that was never read could not be read."""
    for fault in faults:
        if fault.text.startswith("architecture: "):
            unread.add(gpu.uuid)
            raise RetryableError(f"it is not published, since it may not be a GPU: {fault.text}")


def _place(gpu: Gpu) -> tuple[str, str]:
    return (gpu.pci_bus_id or "", gpu.uuid)


_READ_BY: Mapping[str, tuple[str, ...]] = {
    "CUDA compute capability": ("cuda_compute_capability", "multiprocessors"),
    "MIG mode": ("mig_capable", "mig_enabled", "mig_devices"),
    "NUMA node of the memory": ("memory_numa_node",),
    "NVLink": ("nvlink_links",),
    "NVLink fabric": ("fabric", "unready_fabric"),
    "PCI bus ID": ("pci_bus_id",),
    "addressing mode": ("addressing_mode", "memory_numa_node"),
    "architecture": ("architecture",),
    "brand": ("brand",),
    "index": ("index",),
    "memory": ("memory_bytes",),
    "minor number": ("minor",),
    "number of cores": ("multiprocessors",),
    "product name": ("product_name",),
}
"""The fields of a GPU that a query decides, by what its fault is called."""


def _with_known(gpu: Gpu, faults: Iterable[DiscoveryFault], known: Gpu | None) -> Gpu:
    """The GPU, with the earlier value wherever a query failed: a failed query does not mean that the value changed."""
    if known is None:
        return gpu
    failed = {re.sub(r"^NVLink \d+$", "NVLink", fault.text.partition(": ")[0]) for fault in faults}
    names = {name for query in failed for name in _READ_BY.get(query, ())}
    return replace(gpu, **{name: getattr(known, name) for name in names})


def _partitioned(
    handle: Handle, gpu: Gpu, driver_version: str | None, memory: ScanMemory, faults: list[DiscoveryFault]
) -> Gpu:
    partitioning, partition_faults = memory.partitions.read(handle, gpu, driver_version)
    faults += partition_faults
    gpu = replace(gpu, partitioning=partitioning)
    return memory.peers.recalled(handle, gpu) if gpu.can_be_whole else gpu


def _with_mig_devices(
    handle: Handle,
    gpu: Gpu,
    driver_version: str | None,
    memory: ScanMemory,
    foreign_instances: ForeignInstances | None,
    faults: list[DiscoveryFault],
) -> Gpu:
    if gpu.partitioning is None or gpu.uuid in memory.partitions.unread:
        profiles = memory.profiles.of(handle, gpu, driver_version, faults)
        devices, mig_faults = read_mig_devices(handle, gpu, profiles)
    else:
        existing: Sequence[GpuInstance] = gpu.partitioning.withheld
        if foreign_instances is not None:
            existing = foreign_instances(gpu.uuid, existing)
        theirs = {instance.gpu_instance_id for instance in existing}
        if not theirs:
            return gpu
        profiles = {row.profile.profile_id: row.profile for row in gpu.partitioning.profiles}
        devices, mig_faults = read_mig_devices(handle, gpu, profiles, theirs)
    faults += mig_faults
    return replace(gpu, mig_devices=devices)


_HANGS = GpuFingerprint("")


def read_nvml_fingerprint(memory: ScanMemory) -> NvmlFingerprint:
    """A cheap value that differs when a GPU came, was lost or changed its MIG mode; microseconds a GPU.

    One entry a GPU, None for one that NVML calls lost. A GPU that does not answer has the entry of before; one that
    hangs is not lost, so that NVML is not opened again because of it.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    answers = memory.walk.each(range(count), _fingerprint_of)
    known = memory.fingerprints
    for index, answer in answers.items():
        try:
            known[index] = answer.result()
        except NvmlUnavailableError:
            raise
        except DraDriverError:
            known.setdefault(index, None)
    return tuple(known.get(index, _HANGS) for index in range(count))


def _fingerprint_of(index: int) -> GpuFingerprint | None:
    """UUID, minor number and MIG mode: after a drain another card may stand at this index. Raises: DraDriverError if
    the GPU does not say."""
    try:
        with nvml_errors(f"find GPU with NVML index {index}"):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
        minor = supported(pynvml.nvmlDeviceGetMinorNumber, handle)
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
    except DeviceLostError:
        return None
    return GpuFingerprint(uuid, minor, None if mode is None else (int(mode[0]), int(mode[1])))


def _confidential_mode(log: FaultLog) -> ConfidentialMode | None:
    """None too where NVML says that a GPU is lost: it does not say which one, and the others can be read."""
    try:
        return log.read("confidential computing", confidential_mode)
    except DeviceLostError as error:
        log.faults.append(DiscoveryFault(log.subject, f"confidential computing: {error}"))
        return None


def _read_versions(log: FaultLog) -> DriverVersions:
    driver = log.read("driver version", pynvml.nvmlSystemGetDriverVersion)
    cuda = log.read("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion)
    return DriverVersions(driver, None if cuda is None else (cuda // 1000, cuda % 1000 // 10))
