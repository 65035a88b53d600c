"""MIG: NVML's profiles and placements, existing instances, the plugin's own instances, and configured layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from dra_driver.model.dataclass import dataclass, field


class GpuAddress(NamedTuple):
    """How to find a GPU in NVML: by PCI bus ID if known, else by UUID. The UUID is checked in both cases."""

    uuid: str
    pci_bus_id: str | None


class MigAddress(NamedTuple):
    """How to find a MIG device in NVML without a search. Later devices reuse the IDs, but not the UUID."""

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The memory slices of a GPU instance on its GPU: `[start, start + size)`."""

    start: int
    size: int

    @property
    def memory_slices(self) -> range:
        """The memory slices that the placement covers."""
        return range(self.start, self.start + self.size)

    def overlaps(self, other: Placement) -> bool:
        """Whether the placements have a memory slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A GPU instance profile of one GPU. `profile_id` is NVML's ID, not its loop index; memory is in MiB.

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
    """An existing compute instance, which is the device that a container gets.

    `profile` is the profile of the GPU instance. If the compute instance has only some of the GPU instance's
    slices, the profile's name (`1c.3g.40gb`) and multiprocessors are those of the compute instance, and
    `shares_gpu_instance` is set.
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
    """A profile with all its placements on the GPU, in ascending order."""

    profile: MigProfile
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """An existing GPU instance, with or without compute instances.

    `leaving` marks an instance of this plugin that is still to be destroyed.
    """

    gpu_instance_id: int
    profile_id: int
    placement: Placement
    leaving: bool = False

    @property
    def slot(self) -> tuple[int, int]:
        """Profile ID and start, which identify an instance on its GPU."""
        return (self.profile_id, self.placement.start)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The MIG devices that can be created on a GPU.

    `profiles` is NVML's complete list of profiles. `withheld` are the existing GPU instances that this plugin does not
    manage or has yet to destroy; `possible` is every profile and placement that fits next to them, in
    publishing order. `offers_whole` is whether the GPU can also be used whole: no instance is withheld, its MIG
    mode can be changed while it is idle, and only this plugin may have enabled the mode.

    `returning` are the devices that become available again when the `leaving` instances in `withheld` are
    destroyed; `whole_returns` says whether the whole GPU does too. They are not published, but a claim that was
    allocated one of them gets it: Prepare destroys the leaving instances first.
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

    It is written before the instance is created, so that an instance of ours never looks like someone else's.
    The IDs and the UUID of the MIG device are None until they are known. GPU instances do not survive the
    boot `boot_id`. In phase `unknown`, NVML did not report whether it created the instance, so the instance may
    still appear. `gpu_minor` is the GPU's minor number when the instance was created. `is_of_layout` is set if
    the node's MIG layout requires the instance, so that it exists even without a claim.
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
        """Like `GpuInstance.slot`."""
        return (self.profile_id, self.placement.start)

    @property
    def gpu(self) -> GpuAddress:
        """The GPU of the instance."""
        return GpuAddress(self.gpu_uuid, self.pci_bus_id)


LAYOUT_LABEL = "nvidia.com/mig.config"
"""The node label that selects the layout; NVIDIA's mig-manager uses the same label."""
LAYOUT_STATE_LABEL = "nvidia.com/mig.config.state"
"""The node label that a running mig-manager writes."""
MIG_LAYOUT = "mig-layout"
"""The key of the taint on a GPU that must become idle so that its layout can change."""

LayoutState = Literal["applied", "waiting", "refused", "unsupported"]
"""`applied`: the GPU matches the layout. `waiting`: the GPU will be changed when it is idle or an obstacle is removed.
`refused`: the GPU cannot have the layout, and nothing was changed. `unsupported`: the GPU has no MIG, and the layout
does not name it."""


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """The desired state of some GPUs, as counts by profile name. Without counts, only the MIG mode is set.

    If `devices` is None, the entry is for all GPUs; without `filters`, any PCI ID matches.
    """

    mode: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()


Layouts = Mapping[str, tuple[LayoutEntry, ...]]


@dataclass(frozen=True, slots=True)
class MigLayouts:
    """The configured layouts, and how a node selects one: by `name`, or by its label if `from_label` is set
    and the label exists.

    `destroys_foreign` allows the plugin to destroy instances that it did not create.
    """

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
    """The state of the layout on one GPU; `since` is in seconds since 1970, and equality ignores it.

    For a GPU that an entry of the layout names, but the node does not have, `gpu_uuid` is its index.
    """

    gpu_uuid: str
    layout: str
    state: LayoutState
    text: str = ""
    since: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class OwnedMode:
    """The ledger's entry for a GPU whose MIG mode this plugin enabled in boot `boot_id`."""

    gpu_uuid: str
    pci_bus_id: str | None
    boot_id: str
