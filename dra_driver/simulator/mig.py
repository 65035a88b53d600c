"""The rules of MIG: which instances fit, their IDs, and the profiles within a GPU instance.

Functions that change a GPU get a private copy of it, and raise a `Refusal`.
"""

from __future__ import annotations

import time
import uuid

import pynvml

from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass
from dra_driver.simulator.machine_state import ComputeInstance, Gpu, GpuInstance, MigProfile, Model

NAMESPACE = uuid.UUID("6a1b63f4-08f2-5d10-9d8b-4c2f2c0e7a11")
# Compute slices by compute instance profile enum, which is also the profile ID inside an instance.
COMPUTE_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6}


class Refusal(Exception):  # noqa: N818 - a return code of the NVIDIA driver, not our error
    """The NVIDIA driver refuses the call with this NVML return code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    id: int
    slices: int
    max_instances: int
    multiprocessors: int
    name: str


def profile_by_enum(model: Model, enum: int) -> MigProfile | None:
    return next((profile for profile in model.mig if profile.enum == enum), None)


def profile_by_id(model: Model, profile_id: int) -> MigProfile | None:
    return next((profile for profile in model.mig if profile.id == profile_id), None)


def max_devices(model: Model) -> int:
    return max((profile.max_instances for profile in model.mig), default=0)


def compute_profiles(model: Model, profile: MigProfile) -> list[ComputeProfile]:
    unit = min((row.multiprocessors for row in model.mig), default=0)
    offered = []
    for enum, slices in COMPUTE_SLICES.items():
        if slices != profile.slices and (slices > profile.slices or 2 * slices > profile.slices + 1):
            continue
        whole = slices == profile.slices
        offered.append(
            ComputeProfile(
                id=enum,
                slices=slices,
                max_instances=profile.slices // slices,
                multiprocessors=profile.multiprocessors if whole else unit * slices,
                name=f"MIG {profile.name}" if whole else f"MIG {slices}c.{profile.name}",
            )
        )
    return offered


def free_placements(gpu: Gpu, model: Model, profile: MigProfile) -> list[int]:
    """Return the start slices at which one more instance of this profile fits."""
    same = sum(item.profile_id == profile.id for item in gpu.instances)
    if same >= profile.max_instances or not _engines_left(gpu, model, profile):
        return []
    taken = {unit for item in gpu.instances for unit in range(item.start, item.start + item.size)}
    return [start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size))]


def _engines_left(gpu: Gpu, model: Model, wanted: MigProfile) -> bool:
    """Whether enough slices and engines are free. Only JPEG and OFA engines can run out before the memory."""
    rows = [wanted]
    for item in gpu.instances:
        row = profile_by_id(model, item.profile_id)
        if row is not None:
            rows.append(row)
    return (
        all(
            sum(getattr(row, engine) for row in rows) <= max(getattr(row, engine) for row in model.mig)
            for engine in ("slices", "jpeg", "ofa")
        )
        or len(rows) == 1
    )


def create_gpu_instance(
    gpu: Gpu, model: Model, profile_id: int, placement: tuple[int, int] | None = None
) -> GpuInstance:
    profile = profile_by_id(model, profile_id)
    if not gpu.mig_mode or profile is None:
        raise Refusal(
            pynvml.NVML_ERROR_NOT_SUPPORTED if not gpu.mig_mode else pynvml.NVML_ERROR_INVALID_ARGUMENT
        )
    if placement is not None and placement not in profile.placements:
        raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    free = free_placements(gpu, model, profile)
    if not free or (placement is not None and placement[0] not in free):
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    # Without a placement the NVIDIA driver fills from the end, so the order of creation matters.
    start = placement[0] if placement is not None else free[-1]
    taken = {item.id for item in gpu.instances}
    wanted_ids = _instance_ids(model, profile, start)
    number = next(item for item in [*wanted_ids, *range(15)] if item not in taken)
    created = GpuInstance(id=number, profile_id=profile.id, start=start, size=profile.size)
    gpu.instances.append(created)
    return created


def _instance_ids(model: Model, profile: MigProfile, start: int) -> list[int]:
    """Return the IDs that the NVIDIA driver prefers: larger instances get lower IDs."""
    total = max(row.size for row in model.mig)
    if profile.size == total:
        return [0]
    if total == 4:
        return [1 + start // 2] if profile.size == 2 else [3 + start]
    if profile.size == 4:
        return [1, 2]
    return [3 + start // 2] if profile.slices == 2 else [7 + min(start, 6)]


def destroy_gpu_instance(gpu: Gpu, gi: int) -> None:
    instance = gpu.instance(gi)
    if instance is None:
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
    if instance.compute or any(holder.gpu_instance == gi for holder in gpu.holders):
        raise Refusal(pynvml.NVML_ERROR_IN_USE)
    gpu.instances.remove(instance)


def _free_compute_starts(profile: MigProfile, instance: GpuInstance, slices: int) -> list[int]:
    taken = {unit for item in instance.compute for unit in range(item.start, item.start + item.size)}
    return [
        start
        for start in range(0, profile.slices - slices + 1, slices)
        if taken.isdisjoint(range(start, start + slices))
    ]


def create_compute_instance(gpu: Gpu, model: Model, gi: int, profile_id: int) -> ComputeInstance:
    instance = gpu.instance(gi)
    if instance is None:
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
    profile = profile_by_id(model, instance.profile_id)
    if profile is None:
        raise Refusal(pynvml.NVML_ERROR_UNKNOWN)
    offered = next((row for row in compute_profiles(model, profile) if row.id == profile_id), None)
    if offered is None:
        raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    starts = _free_compute_starts(profile, instance, offered.slices)
    if not starts:
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    taken = {item.id for item in instance.compute}
    number = next(item for item in range(8) if item not in taken)
    gpu.mig_serial += 1
    indices = {item.index for _, item in gpu.mig_devices}
    created = ComputeInstance(
        id=number,
        index=next(item for item in range(64) if item not in indices),
        profile_id=profile_id,
        start=starts[0],
        size=offered.slices,
        uuid=f"MIG-{uuid.uuid5(NAMESPACE, f'{gpu.uuid}/{gi}/{number}/{gpu.mig_serial}')}",
    )
    instance.compute.append(created)
    return created


def destroy_compute_instance(gpu: Gpu, gi: int, ci: int) -> None:
    instance = gpu.instance(gi)
    found = next((item for item in instance.compute if item.id == ci), None) if instance else None
    if instance is None or found is None:
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
    for holder in gpu.holders:
        if holder.gpu_instance == gi and holder.compute_instance in (None, ci):
            raise Refusal(pynvml.NVML_ERROR_IN_USE)
    instance.compute.remove(found)


def set_mode(gpu: Gpu, model: Model, on: int, *, has_clients: bool = False) -> int:
    """Return the activation status, which may be an error code."""
    if not model.mig:
        raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if on not in (0, 1):
        raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    busy = has_clients or bool(gpu.holders) or bool(gpu.instances)
    if gpu.mig_mode == on:
        gpu.mig_pending = on
        return int(pynvml.NVML_SUCCESS)
    if model.resetless_mig:
        if busy:
            return int(pynvml.NVML_ERROR_IN_USE)
    else:
        gpu.mig_pending = on
        if busy:
            return int(pynvml.NVML_ERROR_IN_USE)
        if gpu.virtualization:  # a guest cannot reset its GPU, so the mode waits for a reboot
            return int(pynvml.NVML_ERROR_RESET_REQUIRED)
    gpu.mig_mode = gpu.mig_pending = on
    if not model.resetless_mig:
        gpu.forget_limits()
    return int(pynvml.NVML_SUCCESS)


def after_reboot(gpu: Gpu, model: Model) -> None:
    gpu.instances, gpu.holders, gpu.loads = [], [], [[time.time(), 0]]
    gpu.forget_limits()
    gpu.mig_mode = 0 if model.resetless_mig else gpu.mig_pending
    gpu.mig_pending = gpu.mig_mode


def cap_minor(gpu_minor: int, gi: int, ci: int | None = None) -> int:
    minor = 3 + 135 * gpu_minor + 9 * gi
    return minor if ci is None else minor + 1 + ci


def make_device(gpu: Gpu, model: Model, name: str, start: int) -> tuple[GpuInstance, ComputeInstance]:
    """Create a MIG device, as an administrator would. Raises: InvalidConfigError; Refusal."""
    row = next((profile for profile in model.mig if profile.name == name), None)
    if row is None:
        known = ", ".join(item.name for item in model.mig) or "none"
        raise InvalidConfigError(f"{model.name} has no MIG profile {name!r}; it has {known}")
    created = create_gpu_instance(gpu, model, row.id, (start, row.size))
    whole = next(offered.id for offered in compute_profiles(model, row) if offered.slices == row.slices)
    return created, create_compute_instance(gpu, model, created.id, whole)
