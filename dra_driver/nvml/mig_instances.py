"""Finding and reading GPU instances and compute instances by their handles."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import pynvml

from dra_driver.errors import DeviceLostError, NotSupportedError
from dra_driver.model.mig import GpuInstance, MigProfile, Placement
from dra_driver.nvml.failures import Handle, nvml_errors, supported

_COMPUTE_PROFILE_COUNT = getattr(pynvml, "NVML_COMPUTE_INSTANCE_PROFILE_COUNT", 0x9)
# Variants of a size, taken only where they alone give all multiprocessors of the GPU instance.
_COMPUTE_VARIANTS = frozenset({0x7, 0x8})
_SHARED_ENGINES = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED


def gpu_handle(gpu_uuid: str, pci_bus_id: str | None) -> Handle:
    """The handle of a GPU, by its address where that is known, since NVML's search by UUID is slow under load.

    Raises: DeviceLostError where no GPU, or another one, is found; the errors of `nvml_errors`.
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
                f"{action}: NVML shows no such GPU{where}; it was removed or fell off the bus"
            ) from error
    if found != gpu_uuid:
        raise DeviceLostError(f"{action}: GPU {found} is{where} now; the GPU was moved or replaced")
    return handle


def mig_mode(handle: Handle, gpu_uuid: str) -> tuple[bool, bool] | None:
    """MIG mode as (on now, on after the next reset); None on a GPU without MIG.

    Raises: the errors of `nvml_errors`.
    """
    with nvml_errors(f"read MIG mode of GPU {gpu_uuid}"):
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else (bool(mode[0]), bool(mode[1]))


def gpu_instance_handle(handle: Handle, gpu_uuid: str, gpu_instance_id: int) -> Handle | None:
    """The handle of a GPU instance; None if there is none of this ID, as where MIG mode is off.

    Raises: the errors of `nvml_errors`.
    """
    try:
        with nvml_errors(f"find GPU instance {gpu_instance_id} of GPU {gpu_uuid}"):
            try:
                return pynvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance_id)
            except pynvml.NVMLError_NotFound:
                return None
    except NotSupportedError:
        mode = mig_mode(handle, gpu_uuid)
        if mode is None or not mode[0]:
            return None
        raise


def read_gpu_instances(
    handle: Handle, gpu_uuid: str, profiles: Iterable[MigProfile]
) -> tuple[GpuInstance, ...]:
    """Every GPU instance of these profiles by placement; none while MIG mode is off. Unlike the walk of MIG
    devices this shows also those that have no compute instance. One that goes meanwhile is left out.

    Raises: the errors of `nvml_errors`.
    """
    found: list[GpuInstance] = []
    try:
        for profile in profiles:
            with nvml_errors(f"list the GPU instances of profile {profile.profile_id} of GPU {gpu_uuid}"):
                found += _instances_of(handle, profile)
    except NotSupportedError:
        mode = mig_mode(handle, gpu_uuid)
        if mode is None or not mode[0]:
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
    """The placement in NVML's description of a GPU instance."""
    return Placement(int(info.placement.start), int(info.placement.size))


def compute_profiles(instance: Handle) -> list[tuple[int, Any]]:
    """What NVML says of each compute instance profile that a GPU instance offers, with its number.

    Raises: pynvml.NVMLError.
    """
    offered = []
    for number in range(_COMPUTE_PROFILE_COUNT):
        try:
            offered.append((number, _compute_profile(instance, number)))
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
    return offered


def _compute_profile(instance: Handle, number: int) -> Any:
    """Older drivers have version 1 of the struct only."""
    read = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    try:
        return read(instance, number, _SHARED_ENGINES, version=2)
    except pynvml.NVMLError_FunctionNotFound:
        return read(instance, number, _SHARED_ENGINES, version=1)


def whole_compute_profile(offered: Iterable[tuple[int, Any]], profile: MigProfile) -> int | None:
    """The ID of the compute instance profile that takes all of a GPU instance of `profile`; None if none does.

    `offered` as from `compute_profiles`. Where several have all the slices, it is one with all the
    multiprocessors, and rather a plain one than a variant.
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
    """The compute instances in a GPU instance. Raises: pynvml.NVMLError."""
    profiles = {int(info.id): int(info.instanceCount) for _, info in compute_profiles(instance)}
    for profile_id, most in profiles.items():
        rows = (pynvml.c_nvmlComputeInstance_t * max(most, 1))()
        count = ctypes.c_uint(len(rows))
        pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, rows, ctypes.byref(count))
        yield from rows[: count.value]


def compute_identity(compute: Handle) -> tuple[int, str]:
    """ID of a compute instance and UUID of its MIG device, without a search over all MIG devices.

    Raises: pynvml.NVMLError.
    """
    info = pynvml.nvmlComputeInstanceGetInfo(compute)
    return int(info.id), str(pynvml.nvmlDeviceGetUUID(info.device))
