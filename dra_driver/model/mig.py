"""MIG: profiles and placements as NVML lists them, the instances that exist, and the instances that this plugin
made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class GpuAddress(NamedTuple):
    """How NVML finds a GPU: by the PCI bus ID if that is known, else by the UUID. The UUID is checked in any case."""

    uuid: str
    pci_bus_id: str | None


class MigAddress(NamedTuple):
    """How NVML finds a MIG device without a search. The IDs are used again by later devices, the UUID is not."""

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int


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

    `profile` is the profile of the GPU instance. If the compute instance has only a part of its slices, the profile's
    name (`1c.3g.40gb`) and multiprocessors are those of the compute instance, and `shares_gpu_instance` is set.
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

    `leaving` marks an instance that this plugin made and has still to destroy.
    """

    gpu_instance_id: int
    profile_id: int
    placement: Placement
    leaving: bool = False

    @property
    def slot(self) -> tuple[int, int]:
        """Profile ID and start, which identify an instance among the existing instances of its GPU."""
        return (self.profile_id, self.placement.start)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a GPU is cut into MIG devices on demand.

    `profiles` is NVML's whole table. `withheld` are the existing GPU instances that this plugin does not give out;
    `possible` is every profile and placement that fits beside them, in publishing order. `offers_whole` says that the
    GPU can be given out whole too: its MIG mode can be changed while it is idle, and only this plugin may have switched
    it on.

    `returning` and `whole_returns` come back on offer once the `leaving` ones of `withheld` are destroyed.
    They are not published, but a claim that was allocated one of them gets it: preparing it destroys the leaving
    instances first.
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
    """The ledger's entry of a GPU instance that this plugin makes or made.

    It is written before the instance is created, so that an instance of ours never looks like one that somebody else
    made. The IDs and the UUID of the MIG device are None until they are known. No GPU instance survives the boot
    `boot_id`. The phase `orphan` marks an instance that no claim holds and that could not be destroyed yet. `gpu_minor`
    is the GPU's minor number at the time when the instance was made. An instance `is_of_layout` if the node's MIG
    layout asked for it; it stays without a claim.
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
    is_of_layout: bool = False

    @property
    def slot(self) -> tuple[int, int]:
        """As `GpuInstance.slot`."""
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        """The GPU of the instance."""
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)
