"""MIG: mode, profiles, placements, GPU instances, compute instances, MIG devices."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.simulator import mig
from dra_driver.simulator.library.core import (
    KIND_CI,
    KIND_GI,
    KIND_GPU,
    KIND_MIG,
    Core,
    Handle,
    as_handle,
    number,
    put,
    put_handle,
    rows_for,
    target,
)
from dra_driver.simulator.machine_state import ComputeInstance, Gpu, GpuInstance, MigProfile, Model, State
from dra_driver.simulator.mig import Refusal

_PROFILE_FIELDS = {
    "id": "id", "sliceCount": "slices", "instanceCount": "max_instances", "multiprocessorCount": "multiprocessors",
    "copyEngineCount": "copy_engines", "decoderCount": "decoders", "encoderCount": "encoders", "jpegCount": "jpeg",
    "ofaCount": "ofa", "memorySizeMB": "memory_mib",
}  # fmt: skip


def _placement(argument: Any) -> tuple[int, int]:
    placement = target(argument)
    return int(placement.start), int(placement.size)


def _put_all(out: Any, count: Any, handles: list[int], kind: Any) -> None:
    put(count, len(handles))
    rows = target(out)
    for index, handle in enumerate(handles if rows is not None else []):
        rows[index] = as_handle(handle, kind)


class Instances(Core):
    """nvmlDevice*Mig*, nvmlDevice*GpuInstance*, nvmlGpuInstance*, nvmlComputeInstance*."""

    # --- mode ----------------------------------------------------------------------------------

    def _mig_capable(self, handle: Any) -> tuple[State, Gpu, Model]:
        state, gpu = self.gpu(handle)
        model = state.model_of(gpu)
        if not model.mig:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return state, gpu, model

    def _mig_on(self, handle: Any) -> tuple[State, Gpu, Model]:
        state, gpu, model = self._mig_capable(handle)
        if not gpu.mig_mode:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return state, gpu, model

    def nvmlDeviceSetMigMode(self, handle: Any, mode: Any, status: Any) -> None:  # noqa: N802
        _, gpu, _ = self._mig_capable(handle)
        has_clients = bool(self.machine.clients())
        put(status, self.machine.change_mig_mode(gpu.uuid, number(mode), has_clients=has_clients))

    # --- profiles ------------------------------------------------------------------------------

    def _profile(self, model: Model, profile_id: Any) -> MigProfile:
        profile = mig.profile_by_id(model, number(profile_id))
        if profile is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return profile

    def _fill_profile(self, info: Any, profile: MigProfile) -> None:
        for name, source in _PROFILE_FIELDS.items():
            setattr(info, name, getattr(profile, source))

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, enum: Any, out: Any) -> None:  # noqa: N802
        _, _, model = self._mig_capable(handle)
        self._fill_profile(target(out), self._profile_by_enum(model, number(enum)))

    def nvmlDeviceGetGpuInstanceProfileInfoV(self, handle: Any, enum: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        if info.version != pynvml.nvmlGpuInstanceProfileInfo_v2:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        _, _, model = self._mig_capable(handle)
        profile = self._profile_by_enum(model, number(enum))
        self._fill_profile(info, profile)
        info.name = f"MIG {profile.name}".encode()

    def _profile_by_enum(self, model: Model, enum: int) -> MigProfile:
        if enum >= pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        profile = mig.profile_by_enum(model, enum)
        if profile is None:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return profile

    def nvmlDeviceGetGpuInstancePossiblePlacements_v2(  # noqa: N802
        self, handle: Any, profile_id: Any, out: Any, count: Any
    ) -> None:
        _, _, model = self._mig_capable(handle)
        placements = self._profile(model, profile_id).placements
        if out is None:
            put(count, len(placements))
        else:
            for row, (start, size) in zip(rows_for(out, count, len(placements)), placements, strict=False):
                row.start, row.size = start, size

    # --- GPU instances -------------------------------------------------------------------------

    def nvmlDeviceCreateGpuInstance(self, handle: Any, profile_id: Any, out: Any) -> None:  # noqa: N802
        self._create(handle, number(profile_id), None, out)

    def nvmlDeviceCreateGpuInstanceWithPlacement(  # noqa: N802
        self, handle: Any, profile_id: Any, placement: Any, out: Any
    ) -> None:
        self._create(handle, number(profile_id), _placement(placement), out)

    def _create(self, handle: Any, profile_id: int, placement: tuple[int, int] | None, out: Any) -> None:
        _, gpu, _ = self._mig_capable(handle)
        made = self.machine.change_gpu(
            gpu.uuid, lambda copy, model: mig.create_gpu_instance(copy, model, profile_id, placement).id
        )
        put_handle(out, self.make(KIND_GI, gpu.uuid, made))

    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: Any, out: Any, count: Any) -> None:  # noqa: N802
        _, gpu, model = self._mig_on(handle)
        wanted = self._profile(model, profile_id).id
        found = [item.id for item in gpu.instances if item.profile_id == wanted]
        handles = [self.make(KIND_GI, gpu.uuid, gi) for gi in found]
        _put_all(out, count, handles, pynvml.c_nvmlGpuInstance_t)

    def nvmlDeviceGetGpuInstanceById(self, handle: Any, gi: Any, out: Any) -> None:  # noqa: N802
        _, gpu, _ = self._mig_on(handle)
        if gpu.instance(number(gi)) is None:
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        put_handle(out, self.make(KIND_GI, gpu.uuid, number(gi)))

    def _instance(self, handle: Any) -> tuple[State, Gpu, GpuInstance]:
        state = self.state()
        parsed = self.parse(handle)
        if parsed.kind != KIND_GI:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self.gpu_of(state, parsed.gpu)
        instance = gpu.instance(parsed.gi)
        if instance is None:
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        return state, gpu, instance

    def nvmlGpuInstanceGetInfo(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu, instance = self._instance(handle)
        info = target(out)
        info.device = as_handle(self.make(KIND_GPU, gpu.uuid), pynvml.c_nvmlDevice_t)
        info.id, info.profileId = instance.id, instance.profile_id
        info.placement.start, info.placement.size = instance.start, instance.size

    def nvmlGpuInstanceDestroy(self, handle: Any) -> None:  # noqa: N802
        _, gpu, instance = self._instance(handle)
        self.machine.change_gpu(gpu.uuid, lambda copy, _: mig.destroy_gpu_instance(copy, instance.id))

    # --- compute instances ---------------------------------------------------------------------

    def _compute_profiles(self, state: State, gpu: Gpu, instance: GpuInstance) -> list[mig.ComputeProfile]:
        model = state.model_of(gpu)
        return mig.compute_profiles(model, self._profile(model, instance.profile_id))

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(  # noqa: N802
        self, handle: Any, enum: Any, engine: Any, out: Any
    ) -> None:
        self._compute_profile_info(handle, enum, engine, target(out))

    def nvmlGpuInstanceGetComputeInstanceProfileInfoV(  # noqa: N802
        self, handle: Any, enum: Any, engine: Any, out: Any
    ) -> None:
        info = target(out)
        if info.version != pynvml.nvmlComputeInstanceProfileInfo_v2:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info.name = self._compute_profile_info(handle, enum, engine, info).name.encode()

    def _compute_profile_info(self, handle: Any, enum: Any, engine: Any, info: Any) -> mig.ComputeProfile:
        state, gpu, instance = self._instance(handle)
        if number(engine) != 0 or number(enum) >= pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        offered = self._compute_profiles(state, gpu, instance)
        row = next((item for item in offered if item.id == number(enum)), None)
        if row is None:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info.id, info.sliceCount, info.instanceCount = row.id, row.slices, row.max_instances
        info.multiprocessorCount = row.multiprocessors
        return row

    def nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile_id: Any, out: Any) -> None:  # noqa: N802
        _, gpu, instance = self._instance(handle)
        made = self.machine.change_gpu(
            gpu.uuid,
            lambda copy, model: mig.create_compute_instance(copy, model, instance.id, number(profile_id)).id,
        )
        put_handle(out, self.make(KIND_CI, gpu.uuid, instance.id, made))

    def nvmlGpuInstanceGetComputeInstances(self, handle: Any, profile_id: Any, out: Any, count: Any) -> None:  # noqa: N802
        _, gpu, instance = self._instance(handle)
        found = [item.id for item in instance.compute if item.profile_id == number(profile_id)]
        handles = [self.make(KIND_CI, gpu.uuid, instance.id, ci) for ci in found]
        _put_all(out, count, handles, pynvml.c_nvmlComputeInstance_t)

    def nvmlGpuInstanceGetComputeInstanceById(self, handle: Any, ci: Any, out: Any) -> None:  # noqa: N802
        _, gpu, instance = self._instance(handle)
        if all(item.id != number(ci) for item in instance.compute):
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        put_handle(out, self.make(KIND_CI, gpu.uuid, instance.id, number(ci)))

    def _compute(self, handle: Any) -> tuple[Gpu, GpuInstance, ComputeInstance]:
        state = self.state()
        parsed = self.parse(handle)
        if parsed.kind != KIND_CI:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self.gpu_of(state, parsed.gpu)
        return gpu, *self.mig_device(gpu, parsed)

    def nvmlComputeInstanceGetInfo_v2(self, handle: Any, out: Any) -> None:  # noqa: N802
        gpu, instance, found = self._compute(handle)
        info = target(out)
        info.device = as_handle(self.make(KIND_MIG, gpu.uuid, instance.id, found.id), pynvml.c_nvmlDevice_t)
        info.gpuInstance = as_handle(self.make(KIND_GI, gpu.uuid, instance.id), pynvml.c_nvmlGpuInstance_t)
        info.id, info.profileId = found.id, found.profile_id
        info.placement.start, info.placement.size = found.start, found.size

    def nvmlComputeInstanceDestroy(self, handle: Any) -> None:  # noqa: N802
        gpu, instance, found = self._compute(handle)
        self.machine.change_gpu(
            gpu.uuid, lambda copy, _: mig.destroy_compute_instance(copy, instance.id, found.id)
        )

    # --- MIG devices ---------------------------------------------------------------------------

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        wanted = number(index)
        if wanted >= mig.max_devices(state.model_of(gpu)):
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        devices = gpu.mig_devices if gpu.mig_mode else []
        for instance, found in devices:
            if found.index == wanted:
                return put_handle(out, self.make(KIND_MIG, gpu.uuid, instance.id, found.id))
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceIsMigDeviceHandle(self, handle: Any, out: Any) -> None:  # noqa: N802
        self.state()
        put(out, int(self.parse(handle).is_mig))

    def _mig_handle(self, handle: Any) -> tuple[State, Gpu, Handle]:
        state, gpu, parsed = self.device(handle)
        if not parsed.is_mig:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return state, gpu, parsed

    def nvmlDeviceGetGpuInstanceId(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self._mig_handle(handle)[2].gi)

    def nvmlDeviceGetComputeInstanceId(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self._mig_handle(handle)[2].ci)

    def nvmlDeviceGetAttributes_v2(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        if not parsed.is_mig:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        instance, found = self.mig_device(gpu, parsed)
        profile = self._profile(state.model_of(gpu), instance.profile_id)
        row = next(
            item for item in self._compute_profiles(state, gpu, instance) if item.id == found.profile_id
        )
        info = target(out)
        info.multiprocessorCount = row.multiprocessors
        info.gpuInstanceSliceCount, info.computeInstanceSliceCount = profile.slices, row.slices
        info.memorySizeMB = profile.memory_mib
