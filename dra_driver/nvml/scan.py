"""What NVML knows of this node, as an Inventory without the host's part (PCIe root, NUMA node)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pynvml

from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError, StateError
from dra_driver.model.fingerprint import GpuFingerprint, NvmlFingerprint
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import ConfidentialMode, DiscoveryFault, DriverVersions, Inventory
from dra_driver.model.mig import GpuInstance, MigProfile
from dra_driver.nvml.confidential import confidential_mode
from dra_driver.nvml.failures import Handle, nvml_errors, supported
from dra_driver.nvml.mig_devices import Tables, read_mig_devices, read_profiles
from dra_driver.nvml.mig_partitions import PartitionReader
from dra_driver.nvml.readings import FaultLog, read_gpu
from dra_driver.nvml.topology import PeerMemory, read_reachable_pairs

ForeignInstances = Callable[[str, Sequence[GpuInstance]], Sequence[GpuInstance]]
"""Of the instances on a GPU (its UUID) those that somebody else made. Raises: StateError."""


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """What one scan keeps for the next. For one thread at a time. `known` are GPUs by UUID as they last answered."""

    partitions: PartitionReader = field(default_factory=PartitionReader)
    peers: PeerMemory = field(default_factory=PeerMemory)
    known: dict[str, Gpu] = field(default_factory=dict)
    profiles: Tables[dict[int, MigProfile]] = field(default_factory=lambda: Tables(read_profiles))


def read_gpus(
    on_demand: Callable[[Gpu], bool] | None,
    memory: ScanMemory,
    foreign_instances: ForeignInstances | None,
) -> Inventory:
    """All GPUs that answer, in PCI order, without NVLink domains. A GPU that does not answer is a fault and hides no
    other. One that NVML lists but whose PCI bus ID it cannot read is as it last was.

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
    found: list[tuple[Handle, Gpu]] = []
    faults = log.faults
    unread = memory.partitions.unread
    unread.clear()
    silent: set[str] = set()
    for index in range(count):
        try:
            handle, gpu, gpu_faults = read_gpu(index)
            known = memory.known.get(gpu.uuid)
            if gpu.pci_bus_id is None and known is not None:
                if known.partitioning is not None:
                    unread.add(gpu.uuid)
                silent.add(gpu.uuid)
                found.append((handle, known))
                text = f"NVML cannot read it, so it is shown as it last answered: {gpu_faults[0].text}"
                faults.append(DiscoveryFault(f"GPU {gpu.uuid}", text))
                continue
            if on_demand is not None and on_demand(gpu):
                gpu = _partitioned(handle, gpu, versions.driver, memory, gpu_faults)
            if gpu.mig_enabled:
                gpu = _with_mig_devices(handle, gpu, versions.driver, memory, foreign_instances, gpu_faults)
        except (NvmlUnavailableError, StateError):
            raise
        except DraDriverError as error:
            faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
            continue
        memory.known[gpu.uuid] = gpu
        found.append((handle, gpu))
        faults += gpu_faults
    found.sort(key=lambda pair: (pair[1].pci_bus_id or "", pair[1].uuid))
    gpus = [gpu for _, gpu in found]
    pairs = read_reachable_pairs(found, memory.peers, silent)
    return Inventory(
        versions,
        tuple(gpus),
        faults=tuple(faults),
        unread=frozenset(unread),
        reachable_pairs=pairs,
        confidential_compute=confidential,
    )


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


def read_nvml_fingerprint() -> NvmlFingerprint:
    """A cheap value that differs when a GPU came, was lost or changed its MIG mode; microseconds a GPU.

    One entry a GPU, None for one that does not answer.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    return tuple(_fingerprint_of(index) for index in range(count))


def _fingerprint_of(index: int) -> GpuFingerprint | None:
    """UUID, minor number and MIG mode: after a drain another card may stand at this index."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        minor = supported(pynvml.nvmlDeviceGetMinorNumber, handle)
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
    except (pynvml.NVMLError, DraDriverError):
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
