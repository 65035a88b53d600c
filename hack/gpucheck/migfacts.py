"""The MIG tables and instances of one GPU, as a machine file wants them."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml  # noqa: TID251  a recording holds what the binding answers, not what the driver makes of it

from dra_driver.errors import DraDriverError
from dra_driver.model.gpu import Gpu
from dra_driver.model.mig import MigProfile
from dra_driver.nvml.failures import nvml_errors
from dra_driver.nvml.mig import read_profiles

JsonObject = dict[str, Any]
Handle = Any

_PROFILE_COUNT = getattr(pynvml, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0x12)


def profile_rows(handle: Handle, gpu: Gpu) -> list[list[Any]]:
    """A row of the MIG table for each profile: enum, id, name, slices, max, memory, engines, size, starts."""
    profiles = read_profiles(handle, gpu, [])
    rows = []
    for enum in range(_PROFILE_COUNT):
        profile = profiles.get(_profile_id(handle, enum))
        if profile is None:
            continue
        placements = _placements(handle, profile.profile_id)
        rows.append(
            [
                enum,
                profile.profile_id,
                profile.name,
                profile.slice_count,
                profile.max_instances,
                profile.memory_mib,
                profile.multiprocessors,
                profile.copy_engines,
                profile.decoders,
                profile.encoders,
                profile.jpeg_engines,
                profile.ofa_engines,
                placements[0][1] if placements else 0,
                [start for start, _ in placements],
            ]
        )
    return rows


def _profile_id(handle: Handle, enum: int) -> int:
    for version in (2, 1):
        try:
            return int(pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=version).id)
        except pynvml.NVMLError:
            continue
    return -1


def _placements(handle: Handle, profile_id: int) -> list[tuple[int, int]]:
    """(start, size) of each place that the profile can have; none where NVML does not tell."""
    count = ctypes.c_uint()
    get = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    try:
        get(handle, profile_id, None, ctypes.byref(count))
        places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        get(handle, profile_id, ctypes.byref(places), ctypes.byref(count))
    except pynvml.NVMLError:
        return []
    return sorted((int(place.start), int(place.size)) for place in places[: count.value])


def instances(handle: Handle, gpu: Gpu) -> list[JsonObject]:
    """Every GPU instance with its compute instances, also one without any. Raises: DraDriverError."""
    compute = _compute_instances(handle, gpu)
    profiles: dict[int, MigProfile] = read_profiles(handle, gpu, [])
    found = []
    for profile in profiles.values():
        for instance in _gpu_instances(handle, gpu, profile):
            info = pynvml.nvmlGpuInstanceGetInfo(instance)
            found.append(
                {
                    "profile": profile.name,
                    "start": int(info.placement.start),
                    "instance": int(info.id),
                    "compute": compute.get(int(info.id), []),
                }
            )
    return sorted(found, key=lambda item: (item["start"], item["instance"]))


def _gpu_instances(handle: Handle, gpu: Gpu, profile: MigProfile) -> list[Handle]:
    count = ctypes.c_uint(profile.max_instances)
    handles = (pynvml.c_nvmlGpuInstance_t * max(1, profile.max_instances))()
    with nvml_errors(f"list the {profile.name} instances of GPU {gpu.uuid}"):
        pynvml.nvmlDeviceGetGpuInstances(handle, profile.profile_id, handles, ctypes.byref(count))
    return list(handles[: count.value])


def _compute_instances(handle: Handle, gpu: Gpu) -> dict[int, list[JsonObject]]:
    """Compute instances by GPU instance ID, each with its index, ID, size, start and UUID."""
    found: dict[int, list[JsonObject]] = {}
    with nvml_errors(f"count the MIG devices of GPU {gpu.uuid}"):
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    for index in range(most):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue
        with nvml_errors(f"read MIG device {index} of GPU {gpu.uuid}"):
            instance = int(pynvml.nvmlDeviceGetGpuInstanceId(mig))
            number = int(pynvml.nvmlDeviceGetComputeInstanceId(mig))
            entry = {
                "index": index,
                "id": number,
                "slices": int(pynvml.nvmlDeviceGetAttributes(mig).computeInstanceSliceCount),
                "start": _compute_start(handle, instance, number),
                "uuid": pynvml.nvmlDeviceGetUUID(mig),
            }
        found.setdefault(instance, []).append(entry)
    return found


def _compute_start(handle: Handle, instance: int, number: int) -> int:
    """The first compute slice; 0 where NVML does not tell, since nothing but later creations depends on it."""
    try:
        with nvml_errors("read a compute instance"):
            owner = pynvml.nvmlDeviceGetGpuInstanceById(handle, instance)
            compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(owner, number)
            return int(pynvml.nvmlComputeInstanceGetInfo(compute).placement.start)
    except DraDriverError:
        return 0
