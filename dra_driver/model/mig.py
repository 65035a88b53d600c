"""MIG: profiles and placements as NVML tells them, and the devices that exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Where a GPU instance lies, in memory slices of its GPU: `[start, start + size)`."""

    start: int
    size: int

    @property
    def memory_slices(self) -> range:
        """The memory slices that the placement covers."""
        return range(self.start, self.start + self.size)

    def overlaps(self, other: Placement) -> bool:
        """Whether both placements use a memory slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A GPU instance profile of one GPU. `profile_id` is NVML's id, not its loop index; memory in MiB.

    Source: nvmlGpuInstanceProfileInfo_t.
    """

    profile_id: int
    name: str
    slice_count: int
    max_instances: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg_engines: int
    ofa_engines: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A compute instance that exists, as the device that a container gets.

    `profile` is the GPU instance's; where the compute instance has only a part of its slices, its name
    (`1c.3g.40gb`) and its multiprocessors are the compute instance's own, and `shares_gpu_instance` is set.
    """

    uuid: str
    parent_uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: MigProfile
    placement: Placement
    shares_gpu_instance: bool = False
