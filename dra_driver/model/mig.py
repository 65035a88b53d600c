"""MIG: profiles and placements as NVML tells them, the instances that exist, and those that we made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


@dataclass(frozen=True, slots=True)
class PlacedProfile:
    """A profile with every placement that the GPU has for it, in ascending order."""

    profile: MigProfile
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance that exists, with or without compute instances in it.

    `leaving` marks one of this driver's own making that is still to be destroyed.
    """

    gpu_instance_id: int
    profile_id: int
    placement: Placement
    leaving: bool = False

    @property
    def slot(self) -> tuple[int, int]:
        """Profile ID and start: what tells two instances of one GPU apart for as long as both exist."""
        return (self.profile_id, self.placement.start)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a GPU is cut into MIG devices on demand.

    `profiles` is NVML's whole table. `withheld` are the GPU instances that exist and are not ours to give
    out; `possible` is every profile and placement that fits beside them, in publishing order. `offers_whole`
    says that the GPU can be given out whole too: its mode can be changed while it is idle, and nobody but us
    switched it on.

    `returning` and `whole_returns` are what comes in addition once the `leaving` ones of `withheld` are destroyed.
    That is not published, but whoever has been given it already gets it: making it destroys them first.
    """

    profiles: tuple[PlacedProfile, ...]
    possible: tuple[tuple[MigProfile, Placement], ...] = ()
    withheld: tuple[GpuInstance, ...] = ()
    offers_whole: bool = True
    returning: tuple[tuple[MigProfile, Placement], ...] = ()
    whole_returns: bool = False


MigPhase = Literal["creating", "created", "orphan"]


@dataclass(frozen=True, slots=True)
class OwnedInstance:
    """The ledger's entry of a GPU instance that this driver makes or made.

    Written before the instance is created, so that nothing of ours is ever taken for somebody else's. IDs and
    the MIG device's UUID are None until they are known; GPU instances never survive the boot `boot_id`.
    `orphan` marks one that no claim holds and that could not be destroyed yet. `gpu_minor` is that of the
    GPU when the instance was made.
    """

    device: str
    gpu_uuid: str
    pci_bus_id: str | None
    profile_id: int
    profile_name: str
    placement: Placement
    boot_id: str
    phase: MigPhase = "creating"
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    uuid: str | None = None
    gpu_minor: int | None = None

    @property
    def slot(self) -> tuple[int, int]:
        """As GpuInstance.slot."""
        return (self.profile_id, self.placement.start)
