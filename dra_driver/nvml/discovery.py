"""What NVML knows of this node, as an Inventory without the host's part (PCIe root, NUMA node)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

from dra_driver.core.topology import can_be_whole, nvlink_domains
from dra_driver.errors import DraDriverError, NvmlUnavailableError, StateError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault, DriverVersions, Inventory
from dra_driver.model.mig import GpuInstance, MigProfile
from dra_driver.model.pulse import Beat, Pulse
from dra_driver.nvml.failures import nvml_errors, supported
from dra_driver.nvml.mig import read_mig_devices, read_profiles
from dra_driver.nvml.partitions import PartitionReader
from dra_driver.nvml.readings import FaultLog, read_gpu
from dra_driver.nvml.topology import PeerMemory, read_reachable_pairs

Handle = Any
SortOut = Callable[[str, Sequence[GpuInstance]], Sequence[GpuInstance]]
"""Of a GPU and what exists on it: what is not of the driver's own making. Raises: StateError."""


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """What one scan leaves to the next; for one thread at a time."""

    partitions: PartitionReader = field(default_factory=PartitionReader)
    peers: PeerMemory = field(default_factory=PeerMemory)
    profiles: dict[tuple[str, str | None], dict[int, MigProfile]] = field(default_factory=dict)

    def reopened(self) -> None:
        """NVML was initialised anew."""
        self.peers.reopened()


def never(gpu: Gpu) -> bool:
    """No GPU: MIG devices are not made on demand."""
    return False


def everything(_gpu_uuid: str, existing: Sequence[GpuInstance]) -> Sequence[GpuInstance]:
    """All instances, as if none were of the driver's own making."""
    return existing


def read_inventory(
    on_demand: Callable[[Gpu], bool] = never, memory: ScanMemory | None = None, sort_out: SortOut = everything
) -> Inventory:
    """All GPUs that answer, in PCI order; each GPU that does not is a fault and hides no other.

    GPUs that `on_demand` selects, and that can be cut, have their partitioning, with all GPU instances that
    exist as `withheld`, and of the MIG devices those that `sort_out` leaves. `memory` is the same object in each
    scan.

    Raises: NvmlUnavailableError if NVML itself does not answer; what `sort_out` raises.
    """
    memory = ScanMemory() if memory is None else memory
    log = FaultLog("NVML")
    versions = _read_versions(log)
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    found: list[tuple[Handle, Gpu]] = []
    faults = log.faults
    unread = memory.partitions.unread
    unread.clear()
    for index in range(count):
        try:
            handle, gpu, gpu_faults = read_gpu(index)
            if on_demand(gpu):
                gpu = _partitioned(handle, gpu, versions.driver, memory, gpu_faults)
            if gpu.mig_enabled:
                gpu = _with_mig_devices(handle, gpu, versions.driver, memory, sort_out, gpu_faults)
        except (NvmlUnavailableError, StateError):
            raise
        except DraDriverError as error:
            faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
            continue
        found.append((handle, gpu))
        faults += gpu_faults
    found.sort(key=lambda pair: (pair[1].pci_bus_id or "", pair[1].uuid))
    gpus = [gpu for _, gpu in found]
    domains = nvlink_domains(gpus, read_reachable_pairs(found, memory.peers))
    return Inventory(versions, tuple(gpus), domains, tuple(faults), unread=frozenset(unread))


def _partitioned(
    handle: Handle, gpu: Gpu, driver_version: str | None, memory: ScanMemory, faults: list[DiscoveryFault]
) -> Gpu:
    partitioning, partition_faults = memory.partitions.read(handle, gpu, driver_version)
    faults += partition_faults
    gpu = replace(gpu, partitioning=partitioning)
    return memory.peers.recalled(handle, gpu) if can_be_whole(gpu) else gpu


def _with_mig_devices(
    handle: Handle,
    gpu: Gpu,
    driver_version: str | None,
    memory: ScanMemory,
    sort_out: SortOut,
    faults: list[DiscoveryFault],
) -> Gpu:
    if gpu.partitioning is None or gpu.uuid in memory.partitions.unread:
        profiles = _profiles(handle, gpu, driver_version, memory, faults)
        devices, mig_faults = read_mig_devices(handle, gpu, profiles)
    else:
        theirs = {instance.gpu_instance_id for instance in sort_out(gpu.uuid, gpu.partitioning.withheld)}
        if not theirs:
            return gpu
        profiles = {row.profile.profile_id: row.profile for row in gpu.partitioning.profiles}
        devices, mig_faults = read_mig_devices(handle, gpu, profiles, theirs.__contains__)
    faults += mig_faults
    return replace(gpu, mig_devices=devices)


def _profiles(
    handle: Handle, gpu: Gpu, driver_version: str | None, memory: ScanMemory, faults: list[DiscoveryFault]
) -> dict[int, MigProfile]:
    """The GPU's table, read once for a driver unless a part of it failed."""
    key = (gpu.uuid, driver_version)
    known = memory.profiles.get(key)
    if known is not None:
        return known
    table_faults: list[DiscoveryFault] = []
    read = read_profiles(handle, gpu, table_faults)
    faults += table_faults
    if not table_faults and driver_version is not None:
        memory.profiles[key] = read
    return read


def read_pulse() -> Pulse:
    """A cheap value that differs when a GPU came, was lost or changed its MIG mode; microseconds a GPU.

    One entry a GPU, None for one that does not answer.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    return tuple(_pulse_of(index) for index in range(count))


def _pulse_of(index: int) -> Beat | None:
    """UUID, minor number and MIG mode: after a drain another card may stand at this index."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        minor = supported(pynvml.nvmlDeviceGetMinorNumber, handle)
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
    except (pynvml.NVMLError, DraDriverError):
        return None
    return Beat(uuid, minor, None if mode is None else (int(mode[0]), int(mode[1])))


def _read_versions(log: FaultLog) -> DriverVersions:
    driver = log.read("driver version", pynvml.nvmlSystemGetDriverVersion)
    cuda = log.read("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion)
    return DriverVersions(driver, None if cuda is None else (cuda // 1000, cuda % 1000 // 10))
