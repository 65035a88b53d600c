"""MIG layouts as the configuration has them, and what became of a layout on each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
