"""MIG profiles, placements, instances and layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from dra_driver.model.dataclass import dataclass, field


class GpuAddress(NamedTuple):
    """NVML finds the GPU by PCI bus ID if known, else by UUID. The UUID is checked in both cases."""

    uuid: str
    pci_bus_id: str | None


class MigAddress(NamedTuple):
    """NVML finds the device without a search. Later devices reuse the IDs, but not the UUID."""

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Memory slices of a GPU: `[start, start + size)`."""

    start: int
    size: int

    @property
    def memory_slices(self) -> range:
        return range(self.start, self.start + self.size)

    def overlaps(self, other: Placement) -> bool:
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True)
class MigProfile:
    """`profile_id` is NVML's ID, not its loop index (nvmlGpuInstanceProfileInfo_t)."""

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
    """A compute instance, which is what a container gets.

    If it has only some slices of its GPU instance, `profile` has its own name (`1c.3g.40gb`) and
    multiprocessors, and the rest of the GPU instance's profile; `shares_gpu_instance` is set.
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
    """`placements` are in ascending order."""

    profile: MigProfile
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """`leaving`: this plugin has yet to destroy it."""

    gpu_instance_id: int
    profile_id: int
    placement: Placement
    leaving: bool = False

    @property
    def slot(self) -> tuple[int, int]:
        return (self.profile_id, self.placement.start)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The MIG devices that can be created on a GPU.

    `profiles` is NVML's complete list. `withheld` are the instances that this plugin does not manage or has
    yet to destroy; `possible` is all that fits next to them, in publishing order. `offers_whole`: no instance
    is withheld, MIG mode can be changed while the GPU is idle, and only this plugin may have enabled the
    mode.

    `returning`, and the whole GPU if `whole_returns`, become available when the `leaving` instances are
    destroyed. They are not published, but a Prepare for one destroys the instances first.
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
    """The ledger's entry for a GPU instance of this plugin.

    It is written before the instance is created, so that no instance of ours looks foreign. In phase
    `unknown`, NVML did not report whether it created the instance, which may still appear. An instance
    `is_of_layout` exists even without a claim.
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
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)


LAYOUT_LABEL = "nvidia.com/mig.config"
"""NVIDIA's mig-manager uses the same label."""
LAYOUT_STATE_LABEL = "nvidia.com/mig.config.state"
"""A running mig-manager writes this label."""
MIG_LAYOUT = "mig-layout"
"""The taint on a GPU that must become idle for its layout."""

LayoutState = Literal["applied", "waiting", "refused", "unsupported"]
"""`waiting`: until the GPU is idle or an obstacle is removed. `refused`: the GPU cannot have the layout, and
nothing was changed. `unsupported`: the GPU has no MIG, and the layout does not name it.
"""


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """Without `counts` by profile name, only the MIG mode is set. `devices` None means all GPUs; without
    `filters`, any PCI ID matches.
    """

    mode: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()


Layouts = Mapping[str, tuple[LayoutEntry, ...]]


@dataclass(frozen=True, slots=True)
class MigLayouts:
    """A node selects a layout by `name`, or by its label if `from_label` is set and the label exists.

    `destroys_foreign`: the plugin may destroy foreign instances.
    """

    named: Mapping[str, tuple[LayoutEntry, ...]] = field(default_factory=dict)
    name: str | None = None
    from_label: bool = False
    destroys_foreign: bool = False

    @property
    def is_on(self) -> bool:
        return self.name is not None or self.from_label


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """`since` is in seconds since 1970. For a GPU that only the layout names, `gpu_uuid` is its index."""

    gpu_uuid: str
    layout: str
    state: LayoutState
    text: str = ""
    since: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class OwnedMode:
    gpu_uuid: str
    pci_bus_id: str | None
    boot_id: str
