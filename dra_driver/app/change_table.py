"""What can change on a node while the plugin runs. Who hears of what stands in one table, in `daemon.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from typing import Any


class Change(Enum):
    """A kind of change. The comments say what else its hearers get."""

    # The kubelet has registered this instance: older instances stand by from now on.
    REGISTERED = auto()
    # Discovery has found other devices than before, or cannot find any.
    INVENTORY = auto()
    # The NVIDIA driver was found for the first time, or was loaded again.
    DRIVER_RELOADED = auto()
    # NVML lists other GPUs with the same driver, or answers again.
    HARDWARE = auto()
    # The health of GPUs and MIG devices has changed in a way that others see.
    HEALTH_SHOWN = auto()
    # The health of one GPU or MIG device went from one state to another: the HealthChange.
    HEALTH = auto()
    # The health of a GPU was polled, maybe with the result of before: UUID, PolledHealth.
    POLLED = auto()
    # A MIG device was made or destroyed on demand, or a MIG mode was switched; or one of these failed: action, device,
    # seconds, error or None.
    MIG_DEVICE = auto()
    # The node's MIG layout got another state on these GPUs; on none where GPUs have no layout any more: the GpuLayouts.
    MIG_LAYOUT = auto()
    # A claim was unprepared: nothing of it is left on the node.
    CLAIM_RELEASED = auto()
    # A claim has ended and its cleanup is pending, or a pending cleanup has ended.
    CLEANUPS = auto()


Hearers = Mapping[Change, Sequence[Callable[..., Any]]]
"""The functions to call for each kind of change."""


class Changes:
    """Passes changes on, in the thread that calls `tell`. Components get this object before the table is set; they tell
    of changes only after their start."""

    def __init__(self) -> None:
        self._hearers: Hearers = {}

    def connect(self, hearers: Hearers) -> None:
        """Set the table: the functions to call for each kind of change, in this order."""
        self._hearers = hearers

    def tell(self, change: Change, *facts: object) -> None:
        """Call every function of the table for this change. Raises: what one of them raised, after the others were
        called too."""
        with ExitStack() as others:
            for hear in reversed(self._hearers.get(change, ())):
                others.callback(hear, *facts)
