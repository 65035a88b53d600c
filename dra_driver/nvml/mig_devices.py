"""Reading the MIG devices that exist on a GPU, and the table of those that it can have."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import pynvml

from dra_driver.errors import NotSupportedError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.model.mig import MigDevice, MigProfile, PlacedProfile, Placement
from dra_driver.nvml.failures import Handle, collected, nvml_errors
from dra_driver.nvml.mig_instances import mig_mode

T = TypeVar("T")

_PROFILE_COUNT = getattr(pynvml, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0x12)
_PROFILE_SUFFIX = {
    0x7: "+me", 0x8: "+me", 0xA: "+gfx", 0xB: "+gfx", 0xC: "+gfx", 0xD: "-me", 0xE: "-me",
    0xF: "+me.all", 0x10: "+me.all", 0x11: "+gfx",
}  # fmt: skip
_TRIES = 3
_MIB = 1 << 20
_GIB = 1 << 30


def read_mig_devices(
    handle: Handle,
    gpu: Gpu,
    profiles: Mapping[int, MigProfile],
    wanted: Container[int] | None = None,
) -> tuple[tuple[MigDevice, ...], list[DiscoveryFault]]:
    """The MIG devices of a GPU in MIG mode, and what could not be read. GPU instances without a compute
    instance are no devices, and one that is destroyed meanwhile leaves a hole.

    `profiles` is the GPU's table by profile ID; `wanted` are the IDs of the GPU instances whose devices matter, None if
    all do. Raises: DeviceLostError, NvmlUnavailableError; RetryableError if the devices cannot be counted.
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
    """The handle of a MIG device, None for the holes of the sparse numbering and once MIG mode is off."""
    try:
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return None
    except pynvml.NVMLError_NotSupported:
        mode = mig_mode(handle, gpu.uuid)
        if mode is None or not mode[0]:
            return None
        raise


def _mig_device_at(
    index: int, handle: Handle, gpu: Gpu, profiles: Mapping[int, MigProfile], wanted: Container[int] | None
) -> MigDevice | None:
    """None for a hole, for a device that is not wanted, and for one that goes while it is read; another that
    comes in its place is read instead."""
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
        placement=Placement(int(info.placement.start), int(info.placement.size)),
        shares_gpu_instance=shares,
    )


def read_profiles(handle: Handle, gpu: Gpu, faults: list[DiscoveryFault]) -> dict[int, MigProfile]:
    """The GPU instance profiles of a GPU by profile ID, from NVML's own table; `faults` gets those that
    could not be read.

    Raises: DeviceLostError, NvmlUnavailableError.
    """
    profiles: dict[int, MigProfile] = {}
    for number in range(_PROFILE_COUNT):
        action = f"read GPU instance profile {number} of GPU {gpu.uuid}"
        with collected(faults, f"GPU {gpu.uuid}"), suppress(NotSupportedError), nvml_errors(action):
            info = _profile_info(handle, number)
            if info is not None:
                profiles[info.id] = _profile(info, number, gpu)
    return profiles


def read_placed_profiles(handle: Handle, gpu: Gpu, faults: list[DiscoveryFault]) -> tuple[PlacedProfile, ...]:
    """The GPU instance profiles of a GPU by profile ID, each with every placement, also while MIG mode is
    off. A profile without placements is none; `faults` gets those that could not be read.

    Raises: DeviceLostError, NvmlUnavailableError.
    """
    placed: list[PlacedProfile] = []
    for profile_id, profile in sorted(read_profiles(handle, gpu, faults).items()):
        action = f"read the placements of profile {profile.name} ({profile_id}) of GPU {gpu.uuid}"
        with collected(faults, f"GPU {gpu.uuid}"), suppress(NotSupportedError), nvml_errors(action):
            placements = _placements(handle, profile_id)
            if placements:
                placed.append(PlacedProfile(profile, placements))
    return tuple(placed)


class Tables(Generic[T]):
    """What `read` gives of each GPU's profiles, read once for a driver unless a part of it failed."""

    def __init__(self, read: Callable[[Handle, Gpu, list[DiscoveryFault]], T]) -> None:
        self._read = read
        self._known: dict[tuple[str, str | None], T] = {}

    def of(self, handle: Handle, gpu: Gpu, driver_version: str | None, faults: list[DiscoveryFault]) -> T:
        """The GPU's table; `faults` gets what could not be read. Raises: DeviceLostError, NvmlUnavailableError."""
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
    """NVML tells their number first, and fills a list of that size then."""
    count = ctypes.c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    if not count.value:
        return ()
    rows = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, rows, ctypes.byref(count))
    return tuple(sorted(Placement(int(row.start), int(row.size)) for row in rows[: count.value]))


def _profile_info(handle: Handle, number: int) -> Any:
    """Version 2 of the struct carries the NVIDIA driver's own name; older drivers have version 1 only."""
    try:
        return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=2)
    except pynvml.NVMLError_InvalidArgument:
        return None
    except pynvml.NVMLError_FunctionNotFound:
        try:
            return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=1)
        except pynvml.NVMLError_InvalidArgument:
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
    """`1g.10gb+me` from the NVIDIA driver's `MIG 1g.10gb+me`."""
    name = getattr(info, "name", None)
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    match = re.search(r"\d+g\.\d+gb\S*", name or "")
    return match[0] if match else None


def _rule_name(info: Any, number: int, total_bytes: int | None) -> str:
    """The profile name by NVIDIA's rule: memory in eighths of the card, rounded half up."""
    total = total_bytes or int(info.memorySizeMB) * _MIB
    eighths = math.ceil(int(info.memorySizeMB) * _MIB / total * 8) / 8
    gigabytes = math.floor(eighths * math.ceil(total / _GIB) + 0.5)
    return f"{int(info.sliceCount)}g.{gigabytes}gb{_PROFILE_SUFFIX.get(number, '')}"
