"""Into which MIG devices a GPU can be cut on demand, and every MIG profile that the GPUs of a machine have."""

from __future__ import annotations

import pynvml

from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.model.mig import GpuInstance, MigProfile, Partitioning, PlacedProfile
from dra_driver.nvml.calls import Handle, collected, nvml_errors
from dra_driver.nvml.mig_reading import (
    Tables,
    gpu_handle,
    mig_mode,
    read_gpu_instances,
    read_placed_profiles,
)
from dra_driver.nvml.readings import FaultLog, read_gpu

_RESETLESS_MIG = getattr(pynvml, "NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED", 184)
_VGPU_GUEST = pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
_FIRST_RESETLESS_ARCHITECTURE = getattr(pynvml, "NVML_DEVICE_ARCH_HOPPER", 9)
_UNKNOWN_ARCHITECTURE = pynvml.NVML_DEVICE_ARCH_UNKNOWN


class PartitionReader:
    """Reads `Gpu.partitioning`. The table of profiles is kept for each GPU and driver version, since it never
    changes; what exists on the GPU is read each time. `unread` has the UUIDs of the GPUs of which something could not
    be read at the last try."""

    def __init__(self) -> None:
        self._tables = Tables(read_placed_profiles)
        self._last: dict[tuple[str, str | None], Partitioning] = {}
        self.unread: set[str] = set()

    def read(
        self, handle: Handle, gpu: Gpu, driver_version: str | None
    ) -> tuple[Partitioning | None, list[DiscoveryFault]]:
        """How the GPU can be cut, and what could not be read. Every GPU instance that exists is `withheld`, and nothing
        is `possible` yet.

        None where MIG devices cannot be made on the GPU: it has no MIG, is a guest of vGPU software, or its mode is off
        and needs a reset to be on. Where a part of the table or of the GPU instances cannot be read, the GPU is
        `unread` and the answer is what was read last, None if there is none: nothing can be placed beside an instance
        that is not seen.

        Raises: DeviceLostError, NvmlUnavailableError.
        """
        log = FaultLog(f"GPU {gpu.uuid}")
        self.unread.discard(gpu.uuid)
        key = (gpu.uuid, driver_version)
        found = self._read(handle, gpu, driver_version, log)
        if found is None and gpu.uuid in self.unread:
            return self._last.get(key), log.faults
        if found is None:
            self._last.pop(key, None)
        else:
            self._last[key] = found
        return found, log.faults

    def _read(
        self, handle: Handle, gpu: Gpu, driver_version: str | None, log: FaultLog
    ) -> Partitioning | None:
        if not gpu.mig_capable:
            return None
        if log.read("virtualization mode", pynvml.nvmlDeviceGetVirtualizationMode, handle) == _VGPU_GUEST:
            return None
        changeable = _mode_is_changeable(log, handle)
        if log.faults and (gpu.uuid, driver_version) in self._last:
            self.unread.add(gpu.uuid)
            return None
        if not changeable and not gpu.mig_enabled:
            return None
        known_faults = len(log.faults)
        profiles: tuple[PlacedProfile, ...] = ()
        existing: tuple[GpuInstance, ...] = ()
        with collected(log.faults, log.subject):
            profiles = self._tables.of(handle, gpu, driver_version, log.faults)
            if gpu.mig_enabled:
                existing = read_gpu_instances(handle, gpu.uuid, [row.profile for row in profiles])
        if len(log.faults) > known_faults:
            self.unread.add(gpu.uuid)
            return None
        if not profiles:
            return None
        return Partitioning(profiles=profiles, withheld=existing, offers_whole=changeable)


def read_what_exists(gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
    """Whether a partitioned GPU is in MIG mode now, and every GPU instance on it.

    Raises: DeviceLostError, NvmlUnavailableError; RetryableError rather than leave one out.
    """
    handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
    mode = mig_mode(handle, gpu.uuid)
    if mode is None or not mode[0]:
        return False, ()
    profiles = gpu.partitioning.profiles if gpu.partitioning is not None else ()
    return True, read_gpu_instances(handle, gpu.uuid, [row.profile for row in profiles])


def _mode_is_changeable(log: FaultLog, handle: Handle) -> bool:
    """Whether MIG mode takes effect without a reset of the GPU; by its generation where NVML does not say."""
    answers = log.read("MIG without reset", pynvml.nvmlDeviceGetFieldValues, handle, [_RESETLESS_MIG])
    if answers is not None and answers[0].nvmlReturn == pynvml.NVML_SUCCESS:
        return bool(answers[0].value.uiVal)
    architecture = log.read("architecture", pynvml.nvmlDeviceGetArchitecture, handle)
    return (
        architecture is not None
        and architecture != _UNKNOWN_ARCHITECTURE
        and architecture >= _FIRST_RESETLESS_ARCHITECTURE
    )


def read_machine_profiles() -> tuple[list[MigProfile], list[DiscoveryFault]]:
    """The profiles of all GPUs that answer, each once, and what could not be read.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    found: dict[MigProfile, None] = {}
    faults: list[DiscoveryFault] = []
    for index in range(count):
        try:
            handle, gpu, _ = read_gpu(index)
            if gpu.mig_capable:
                found |= dict.fromkeys(row.profile for row in read_placed_profiles(handle, gpu, faults))
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
    return list(found), faults
