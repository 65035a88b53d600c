"""What can change on a node while the driver runs. Who hears of what stands in one table, in `daemon.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from dra_driver.mig.context import MigAction
from dra_driver.model.gpu import FabricRegistration
from dra_driver.model.health import HealthChange
from dra_driver.model.mig_layouts import GpuLayout


class Registered(NamedTuple):
    """The kubelet has registered this instance: older instances stand by from now on."""


class InventoryChanged(NamedTuple):
    """Discovery has found other devices than before, or cannot find any."""


class DriverReloaded(NamedTuple):
    """The NVIDIA driver was found for the first time, or was loaded again."""


class HardwareChanged(NamedTuple):
    """NVML lists other GPUs with the same driver, or answers again."""


class HealthShown(NamedTuple):
    """The health of GPUs and MIG devices has changed in a way that others see."""


class HealthChanged(NamedTuple):
    """The health of one GPU or MIG device went from one state to another."""

    change: HealthChange


class FabricPolled(NamedTuple):
    """A poll of health has read how a GPU is registered with its NVLink fabric, which may be as before."""

    gpu_uuid: str
    registration: FabricRegistration


class MigDeviceChanged(NamedTuple):
    """A MIG device was made or destroyed on demand, or a MIG mode was switched; or one of these failed."""

    action: MigAction
    device: str
    duration_s: float
    error: Exception | None


class MigSpaceFreed(NamedTuple):
    """An obstacle to the offer of MIG devices is gone: discovery has to look again."""


class MigLayoutChanged(NamedTuple):
    """The node's MIG layout got another state on these GPUs; none where GPUs have no layout any more."""

    found: Sequence[GpuLayout]


class ClaimReleased(NamedTuple):
    """A claim was unprepared: nothing of it is left on the node."""


class CleanupsChanged(NamedTuple):
    """A claim has ended and its cleanup is pending, or a pending cleanup has ended."""


Change = (
    Registered
    | InventoryChanged
    | DriverReloaded
    | HardwareChanged
    | HealthShown
    | HealthChanged
    | FabricPolled
    | MigDeviceChanged
    | MigSpaceFreed
    | MigLayoutChanged
    | ClaimReleased
    | CleanupsChanged
)
Hearers = Mapping[type, Sequence[Callable[..., Any]]]
"""The functions to call, by type of change; each gets the fields of the change."""


class Changes:
    """Passes changes on, in the thread that calls `tell`. The components get `tell` when they are made, before the
    table is set; they call it only after their start."""

    def __init__(self) -> None:
        self._hearers: Hearers = {}

    def connect(self, hearers: Hearers) -> None:
        """Set the table: the functions to call for each type of change, in this order."""
        self._hearers = hearers

    def tell(self, change: Change) -> None:
        """Call every function of the table for this change. Raises: what one of them raised, after the others were
        called too."""
        with ExitStack() as others:
            for hear in reversed(self._hearers.get(type(change), ())):
                others.callback(hear, *change)
