"""How a claim uses a device that others may use too."""

from __future__ import annotations

from dataclasses import dataclass

from dra_driver.model.mps import MpsDaemonSpec

INTERVALS: tuple[str, ...] = ("Default", "Short", "Medium", "Long")
"""Names of time slice lengths in the order of the NVIDIA driver's levels 0 to 3."""


@dataclass(frozen=True, slots=True)
class TimeSliced:
    """Time-sliced with other claims; `interval` is the NVIDIA driver's level: 0 is the default, None keeps the present
    level."""

    interval: int | None = None


@dataclass(frozen=True, slots=True)
class MpsShared:
    """Through the device's MPS daemon, with the limits of this claim; None means no limit.

    Limits hold for each process of the claim's containers: that is how MPS counts. `memory_limits_mib` are those of all
    devices of the daemon in its order, where it serves several GPUs; else it is empty.
    """

    spec: MpsDaemonSpec
    memory_limit_mib: int | None = None
    active_thread_percentage: int | None = None
    memory_limits_mib: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class LostMps:
    """Through an MPS daemon of which only the MPS host knows the settings, because the claim's record was lost."""


SharingMode = TimeSliced | MpsShared | LostMps | None


def usage_kind(usage: SharingMode) -> str:
    """The mode's name in messages."""
    match usage:
        case TimeSliced():
            return "time-slicing"
        case MpsShared() | LostMps():
            return "MPS"
        case None:
            return "no sharing"
