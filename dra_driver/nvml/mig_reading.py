"""Reads MIG: mode, GPU instances, compute instances, MIG devices, profiles, and what can be created on demand.

Functions raise the errors of `nvml_errors`, unless they name others.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import pynvml

from dra_driver.errors import DeviceLostError, DraDriverError, NotSupportedError, NvmlUnavailableError
from dra_driver.model.dataclass import replace
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.model.mig import GpuInstance, MigDevice, MigProfile, Partitioning, PlacedProfile, Placement
from dra_driver.nvml.calls import Handle, collected, nvml_errors, supported
from dra_driver.nvml.readings import FaultLog, read_gpu

_COMPUTE_PROFILE_COUNT = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT
# Variants of a profile size, used only if no plain profile has all multiprocessors of the GPU instance.
_COMPUTE_VARIANTS = frozenset({0x7, 0x8})
_SHARED_ENGINES = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
T = TypeVar("T")

_PROFILE_COUNT = pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT
_PROFILE_SUFFIX = {
    0x7: "+me", 0x8: "+me", 0xA: "+gfx", 0xB: "+gfx", 0xC: "+gfx", 0xD: "-me", 0xE: "-me",
    0xF: "+me.all", 0x10: "+me.all", 0x11: "+gfx",
}  # fmt: skip
_RESETLESS_MIG = pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED
_VGPU_GUEST = pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
_FIRST_RESETLESS_ARCHITECTURE = pynvml.NVML_DEVICE_ARCH_HOPPER
_UNKNOWN_ARCHITECTURE = pynvml.NVML_DEVICE_ARCH_UNKNOWN
_TRIES = 3
_MIB = 1 << 20
_GIB = 1 << 30


def gpu_handle(gpu_uuid: str, pci_bus_id: str | None) -> Handle:
    """Return the handle of a GPU, by its PCI bus ID if known, because NVML's search by UUID is slow under load.

    Raises: DeviceLostError also if NVML finds a different GPU.
    """
    action = f"find GPU {gpu_uuid}"
    where = "" if pci_bus_id is None else f" at {pci_bus_id}"
    with nvml_errors(action):
        try:
            if pci_bus_id is None:
                return pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            found = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError_NotFound as error:
            raise DeviceLostError(
                f"cannot {action}: NVML shows no such GPU{where}; it was removed or fell off the bus"
            ) from error
    if found != gpu_uuid:
        raise DeviceLostError(f"cannot {action}: GPU {found} is{where} now; the GPU was moved or replaced")
    return handle


def mig_mode(handle: Handle, gpu_uuid: str) -> tuple[bool, bool] | None:
    """Return MIG mode as (current, after the next reset); None for a GPU without MIG."""
    with nvml_errors(f"read MIG mode of GPU {gpu_uuid}"):
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else (bool(mode[0]), bool(mode[1]))


def is_mig_on(handle: Handle, gpu_uuid: str) -> bool:
    mode = mig_mode(handle, gpu_uuid)
    return mode is not None and mode[0]


def gpu_instance_handle(handle: Handle, gpu_uuid: str, gpu_instance_id: int) -> Handle | None:
    """Return None if the instance does not exist, for example because MIG mode is off."""
    try:
        with nvml_errors(f"find GPU instance {gpu_instance_id} of GPU {gpu_uuid}"):
            try:
                return pynvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance_id)
            except pynvml.NVMLError_NotFound:
                return None
    except NotSupportedError:
        if not is_mig_on(handle, gpu_uuid):
            return None
        raise


def read_gpu_instances(
    handle: Handle, gpu_uuid: str, profiles: Iterable[MigProfile]
) -> tuple[GpuInstance, ...]:
    """Return every GPU instance of these profiles sorted by placement; none while MIG mode is off.

    Unlike a list of MIG devices this includes instances without a compute instance.
    """
    found: list[GpuInstance] = []
    try:
        for profile in profiles:
            with nvml_errors(f"list the GPU instances of profile {profile.profile_id} of GPU {gpu_uuid}"):
                found += _instances_of(handle, profile)
    except NotSupportedError:
        if not is_mig_on(handle, gpu_uuid):
            return ()
        raise
    return tuple(sorted(found, key=lambda item: (item.placement, item.gpu_instance_id)))


def _instances_of(handle: Handle, profile: MigProfile) -> Iterator[GpuInstance]:
    rows = (pynvml.c_nvmlGpuInstance_t * max(profile.max_instances, 1))()
    count = ctypes.c_uint(len(rows))
    pynvml.nvmlDeviceGetGpuInstances(handle, profile.profile_id, rows, ctypes.byref(count))
    for row in rows[: count.value]:
        try:
            info = pynvml.nvmlGpuInstanceGetInfo(row)
        except pynvml.NVMLError_NotFound:
            continue
        yield GpuInstance(int(info.id), int(info.profileId), placement_of(info))


def placement_of(info: Any) -> Placement:
    return Placement(int(info.placement.start), int(info.placement.size))


def compute_profiles(instance: Handle) -> list[tuple[int, Any]]:
    """Return (number, NVML's description) of each. Raises: pynvml.NVMLError."""
    offered = []
    for number in range(_COMPUTE_PROFILE_COUNT):
        try:
            offered.append((number, _compute_profile(instance, number)))
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
    return offered


def _compute_profile(instance: Handle, number: int) -> Any:
    read = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    try:
        return read(instance, number, _SHARED_ENGINES, version=2)
    except pynvml.NVMLError_FunctionNotFound:
        return read(instance, number, _SHARED_ENGINES, version=1)


def whole_compute_profile(offered: Iterable[tuple[int, Any]], profile: MigProfile) -> int | None:
    """Return the compute instance profile that covers a whole GPU instance.

    It prefers profiles with all multiprocessors, then plain profiles over variants.
    """
    whole = [(number, info) for number, info in offered if info.sliceCount == profile.slice_count]
    if not whole:
        return None
    _, chosen = min(
        whole,
        key=lambda row: (
            row[1].multiprocessorCount != profile.multiprocessors,
            row[0] in _COMPUTE_VARIANTS,
            row[0],
        ),
    )
    return int(chosen.id)


def compute_instance_handles(instance: Handle) -> Iterator[Handle]:
    profiles = {int(info.id): int(info.instanceCount) for _, info in compute_profiles(instance)}
    for profile_id, most in profiles.items():
        rows = (pynvml.c_nvmlComputeInstance_t * max(most, 1))()
        count = ctypes.c_uint(len(rows))
        pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, rows, ctypes.byref(count))
        yield from rows[: count.value]


def compute_identity(compute: Handle) -> tuple[int, str]:
    """Return a compute instance's ID and its MIG device's UUID. Raises: pynvml.NVMLError."""
    info = pynvml.nvmlComputeInstanceGetInfo(compute)
    return int(info.id), str(pynvml.nvmlDeviceGetUUID(info.device))


def read_mig_devices(
    handle: Handle,
    gpu: Gpu,
    profiles: Mapping[int, MigProfile],
    wanted: Container[int] | None = None,
) -> tuple[tuple[MigDevice, ...], list[DiscoveryFault]]:
    """Return the MIG devices of a GPU in MIG mode, and a fault for each failed read.

    Devices destroyed during the call are omitted. `wanted` limits the result to these GPU instance IDs. Raises:
    DeviceLostError, NvmlUnavailableError; RetryableError if the devices cannot be counted.
    """
    faults: list[DiscoveryFault] = []
    devices: list[MigDevice] = []
    with nvml_errors(f"count the MIG devices of GPU {gpu.uuid}"):
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    for index in range(count):
        action = f"read MIG device {index} of GPU {gpu.uuid}"
        with collected(faults, f"GPU {gpu.uuid}"), nvml_errors(action):
            found = _mig_device_at(index, handle, gpu, profiles, wanted)
            if found is not None:
                devices.append(found)
    return tuple(devices), faults


def _mig_handle(handle: Handle, index: int, gpu: Gpu) -> Handle | None:
    try:
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return None
    except pynvml.NVMLError_NotSupported:
        if not is_mig_on(handle, gpu.uuid):
            return None
        raise


def _mig_device_at(
    index: int, handle: Handle, gpu: Gpu, profiles: Mapping[int, MigProfile], wanted: Container[int] | None
) -> MigDevice | None:
    """Return None for a gap, an unwanted device, and a device destroyed during the call, unless another replaced it."""
    for tries_left in reversed(range(_TRIES)):
        mig = _mig_handle(handle, index, gpu)
        if mig is None:
            return None
        try:
            gpu_instance_id = int(pynvml.nvmlDeviceGetGpuInstanceId(mig))
            if wanted is not None and gpu_instance_id not in wanted:
                return None
            return _read_mig_device(mig, gpu_instance_id, handle, gpu, profiles)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
            if not tries_left:
                raise
    return None


def _read_mig_device(
    mig: Handle, gpu_instance_id: int, parent: Handle, gpu: Gpu, profiles: Mapping[int, MigProfile]
) -> MigDevice:
    info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(parent, gpu_instance_id))
    profile = profiles.get(info.profileId)
    if profile is None:
        raise NotSupportedError(
            f"GPU instance {gpu_instance_id} of GPU {gpu.uuid} has profile {info.profileId}, "
            "which NVML does not list for this GPU"
        )
    attributes = pynvml.nvmlDeviceGetAttributes(mig)
    compute_slices = int(attributes.computeInstanceSliceCount)
    shares = 0 < compute_slices < profile.slice_count
    if shares:
        profile = replace(
            profile,
            name=f"{compute_slices}c.{profile.name}",
            multiprocessors=int(attributes.multiprocessorCount),
        )
    return MigDevice(
        uuid=pynvml.nvmlDeviceGetUUID(mig),
        parent_uuid=gpu.uuid,
        gpu_instance_id=gpu_instance_id,
        compute_instance_id=pynvml.nvmlDeviceGetComputeInstanceId(mig),
        profile=profile,
        placement=placement_of(info),
        shares_gpu_instance=shares,
    )


def read_profiles(handle: Handle, gpu: Gpu, faults: list[DiscoveryFault]) -> dict[int, MigProfile]:
    profiles: dict[int, MigProfile] = {}
    for number in range(_PROFILE_COUNT):
        action = f"read GPU instance profile {number} of GPU {gpu.uuid}"
        with collected(faults, f"GPU {gpu.uuid}"), suppress(NotSupportedError), nvml_errors(action):
            info = _profile_info(handle, number)
            if info is not None:
                profiles[info.id] = _profile(info, number, gpu)
    return profiles


def read_placed_profiles(handle: Handle, gpu: Gpu, faults: list[DiscoveryFault]) -> tuple[PlacedProfile, ...]:
    """Return the profiles that have placements, sorted by ID, whether MIG mode is on or off."""
    placed: list[PlacedProfile] = []
    for profile_id, profile in sorted(read_profiles(handle, gpu, faults).items()):
        action = f"read the placements of profile {profile.name} ({profile_id}) of GPU {gpu.uuid}"
        with collected(faults, f"GPU {gpu.uuid}"), suppress(NotSupportedError), nvml_errors(action):
            placements = _placements(handle, profile_id)
            if placements:
                placed.append(PlacedProfile(profile, placements))
    return tuple(placed)


class Tables(Generic[T]):
    """Caches the result of `read` for each GPU and driver version, unless a part of it failed."""

    def __init__(self, read: Callable[[Handle, Gpu, list[DiscoveryFault]], T]) -> None:
        self._read = read
        self._known: dict[tuple[str, str | None], T] = {}

    def of(self, handle: Handle, gpu: Gpu, driver_version: str | None, faults: list[DiscoveryFault]) -> T:
        key = (gpu.uuid, driver_version)
        if key in self._known:
            return self._known[key]
        own: list[DiscoveryFault] = []
        table = self._read(handle, gpu, own)
        faults += own
        if not own and driver_version is not None:
            self._known[key] = table
        return table


def _placements(handle: Handle, profile_id: int) -> tuple[Placement, ...]:
    count = ctypes.c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    if not count.value:
        return ()
    rows = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, rows, ctypes.byref(count))
    return tuple(sorted(Placement(int(row.start), int(row.size)) for row in rows[: count.value]))


def _profile_info(handle: Handle, number: int) -> Any:
    """Prefer version 2 of the struct, which has the NVIDIA driver's own name for the profile."""
    read = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    with suppress(pynvml.NVMLError_InvalidArgument):
        try:
            return read(handle, number, version=2)
        except pynvml.NVMLError_FunctionNotFound:
            return read(handle, number, version=1)
    return None


def _profile(info: Any, number: int, gpu: Gpu) -> MigProfile:
    return MigProfile(
        profile_id=int(info.id),
        name=_driver_name(info) or _rule_name(info, number, gpu.memory_bytes),
        slice_count=int(info.sliceCount),
        max_instances=int(info.instanceCount),
        multiprocessors=int(info.multiprocessorCount),
        copy_engines=int(info.copyEngineCount),
        decoders=int(info.decoderCount),
        encoders=int(info.encoderCount),
        jpeg_engines=int(info.jpegCount),
        ofa_engines=int(info.ofaCount),
        memory_mib=int(info.memorySizeMB),
    )


def _driver_name(info: Any) -> str | None:
    name = getattr(info, "name", None)
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    match = re.search(r"\d+g\.\d+gb\S*", name or "")
    return match[0] if match else None


def _rule_name(info: Any, number: int, total_bytes: int | None) -> str:
    """Use NVIDIA's rule: the memory in whole eighths of the card's, then in whole gigabytes."""
    total = total_bytes or int(info.memorySizeMB) * _MIB
    eighths = math.ceil(int(info.memorySizeMB) * _MIB / total * 8) / 8
    gigabytes = math.floor(eighths * math.ceil(total / _GIB) + 0.5)
    return f"{int(info.sliceCount)}g.{gigabytes}gb{_PROFILE_SUFFIX.get(number, '')}"


class PartitionReader:
    """Reads `Gpu.partitioning`. `unread` has the GPUs that could not be read completely at the last attempt."""

    def __init__(self) -> None:
        self._tables = Tables(read_placed_profiles)
        self._last: dict[tuple[str, str | None], Partitioning] = {}
        self.unread: set[str] = set()

    def read(
        self, handle: Handle, gpu: Gpu, driver_version: str | None
    ) -> tuple[Partitioning | None, list[DiscoveryFault]]:
        """Return the GPU's partitioning, with all existing GPU instances `withheld`, and a fault for each failed read.

        None if MIG devices cannot be created on the GPU: it has no MIG, is a vGPU guest, or its mode is off and needs a
        reset to change. An incomplete reading gives the last known partitioning or None: no placement is safe next to
        an unseen instance.

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
    handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
    if not is_mig_on(handle, gpu.uuid):
        return False, ()
    profiles = gpu.partitioning.profiles if gpu.partitioning is not None else ()
    return True, read_gpu_instances(handle, gpu.uuid, [row.profile for row in profiles])


def _mode_is_changeable(log: FaultLog, handle: Handle) -> bool:
    """Whether MIG mode changes without a GPU reset; judged by the architecture if NVML does not report it."""
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
    """Return the profiles of all GPUs that answer, and a fault for each failed read. Raises: NvmlUnavailableError."""
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
