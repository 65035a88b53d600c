"""What NVML knows of this node, as an Inventory without the host's part (PCIe root, NUMA node)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pynvml

from dra_driver.core.topology import nvlink_domains
from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault, DriverVersions, Inventory
from dra_driver.nvml.failures import nvml_errors, supported
from dra_driver.nvml.mig import read_mig_devices
from dra_driver.nvml.readings import FaultLog, read_gpu
from dra_driver.nvml.topology import read_reachable_pairs

Handle = Any


def read_inventory() -> Inventory:
    """All GPUs that answer, in PCI order; each GPU that does not is a fault and hides no other.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    log = FaultLog("NVML")
    versions = _read_versions(log)
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    found: list[tuple[Handle, Gpu]] = []
    faults = log.faults
    for index in range(count):
        try:
            handle, gpu, gpu_faults = read_gpu(index)
            if gpu.mig_enabled:
                migs, mig_faults = read_mig_devices(handle, gpu)
                gpu = replace(gpu, mig_devices=migs)
                gpu_faults = gpu_faults + mig_faults
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
            continue
        found.append((handle, gpu))
        faults += gpu_faults
    found.sort(key=lambda pair: (pair[1].pci_bus_id or "", pair[1].uuid))
    gpus = [gpu for _, gpu in found]
    domains = nvlink_domains(gpus, read_reachable_pairs(found))
    return Inventory(versions, tuple(gpus), domains, tuple(faults))


def read_pulse() -> tuple[Hashable, ...]:
    """A cheap value that differs when a GPU came, was lost or changed its MIG mode; microseconds a GPU.

    One entry a GPU, None for one that does not answer.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    return tuple(_pulse_of(index) for index in range(count))


def _pulse_of(index: int) -> Hashable:
    """UUID, minor number and MIG mode: after a drain another card may stand at this index."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        identity = (pynvml.nvmlDeviceGetUUID(handle), supported(pynvml.nvmlDeviceGetMinorNumber, handle))
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
    except (pynvml.NVMLError, DraDriverError):
        return None
    return (*identity, *(mode or ()))


def _read_versions(log: FaultLog) -> DriverVersions:
    driver = log.read("driver version", pynvml.nvmlSystemGetDriverVersion)
    cuda = log.read("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion)
    return DriverVersions(driver, None if cuda is None else (cuda // 1000, cuda % 1000 // 10))
