"""MIG: profiles and placements as NVML lists them, the instances that exist and those that this plugin made, and
layouts as the configuration has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


MigPhase = Literal["creating", "unknown", "created"]


@dataclass(frozen=True, slots=True)
class OwnedInstance:
    """What the ledger says of a GPU instance that this plugin makes or made.

    It is written before the instance is created, so that an instance of ours never looks like one that somebody else
    made. The IDs and the UUID of the MIG device are None until they are known. No GPU instance survives the boot
    `boot_id`. In phase `unknown` NVML left open whether it made the instance, which may still appear. `gpu_minor`
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


LAYOUT_LABEL = "nvidia.com/mig.config"
"""The label of a node that names its layout, as for NVIDIA's mig-manager."""
LAYOUT_STATE_LABEL = "nvidia.com/mig.config.state"
"""The label that a running mig-manager writes."""
MIG_LAYOUT = "mig-layout"
"""The key of the taint on a GPU that is to run empty so that its layout can change."""

LayoutState = Literal["applied", "waiting", "refused"]
"""`applied`: the GPU is as the layout asks. `waiting`: it will be, once it is empty or an obstacle is gone. `refused`:
the layout cannot be on it, and nothing was changed."""
LAYOUT_STATES: tuple[LayoutState, ...] = ("applied", "waiting", "refused")


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """What some GPUs shall be. `devices` None means all; without `filters` any PCI ID will do. The counts are by
    profile name. Without any the entry asks for the MIG mode only."""

    mode: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()


Layouts = Mapping[str, tuple[LayoutEntry, ...]]


@dataclass(frozen=True, slots=True)
class MigLayouts:
    """The layouts that the configuration has by name, and how a node gets one: by `name`, or by its label where
    `from_label` is set and the label is there. `destroys_foreign` says that instances of others go too."""

    named: Mapping[str, tuple[LayoutEntry, ...]] = field(default_factory=dict)
    name: str | None = None
    from_label: bool = False
    destroys_foreign: bool = False

    @property
    def is_on(self) -> bool:
        """Whether this node may get a layout."""
        return self.name is not None or self.from_label


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """What became of the layout on one GPU; `since` is in seconds since 1970 and does not count when two are
    compared."""

    gpu_uuid: str
    layout: str
    state: LayoutState
    text: str = ""
    since: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class OwnedMode:
    """What the ledger says of a GPU whose MIG mode this plugin switched on in boot `boot_id`."""

    gpu_uuid: str
    pci_bus_id: str | None
    boot_id: str
