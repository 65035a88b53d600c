"""How a claim shares a device: time slices or MPS; and MPS daemons: what each should do, its state, and where it shares
files with its clients.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

MpsKind = Literal["gpu", "mig"]
MpsState = Literal["starting", "ready", "fault", "stopped", "failed"]

MPS_STATES: tuple[MpsState, ...] = ("starting", "ready", "fault", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class MpsMember:
    """A whole GPU that an MPS daemon serves beside its first one."""

    device: str
    gpu_uuid: str
    default_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class MpsDaemonSpec:
    """The control daemon of one GPU or MIG device, or of several whole GPUs.

    `device` is the device's name, `uuid` its own UUID and `gpu_uuid` that of its GPU (the same for a whole GPU).
    `multi_user` lets clients of different users share a server; it needs Volta and the NVIDIA driver's branch R555, or
    newer. Without it the daemon serves one user at a time. The default limits hold for clients that have no tighter
    limit; None leaves the default of MPS: all threads, all memory.

    A daemon of several GPUs has the name of the GPU with the lowest UUID, and `others` are the rest in the order of
    their UUIDs. Its clients number the GPUs in this order. An MPS host of an older release refuses `others`.
    """

    device: str
    uuid: str
    kind: MpsKind
    gpu_uuid: str
    multi_user: bool = False
    default_active_thread_percentage: int | None = None
    default_memory_limit_mib: int | None = None
    others: tuple[MpsMember, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices that the daemon serves, as its clients number them."""
        return (self.device, *(other.device for other in self.others))

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs of `devices`."""
        return (self.gpu_uuid, *(other.gpu_uuid for other in self.others))

    @property
    def visible(self) -> str:
        """What the daemon sees, as CUDA_VISIBLE_DEVICES has it."""
        return ",".join((self.uuid, *(other.gpu_uuid for other in self.others)))

    @property
    def default_memory_limits_mib(self) -> tuple[int | None, ...]:
        """The default limit of each of `devices`."""
        return (self.default_memory_limit_mib, *(other.default_memory_limit_mib for other in self.others))

    def differences(self, other: MpsDaemonSpec) -> tuple[str, ...]:
        """The differences, as `name: mine, not theirs`; empty if both are equal."""
        pairs = (
            (entry.name, getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)
        )
        return tuple(
            f"{name}: {_shown(mine)}, not {_shown(theirs)}" for name, mine, theirs in pairs if mine != theirs
        )


@dataclass(frozen=True, slots=True)
class MpsDaemonStatus:
    """The last known state of a control daemon. `since` is when it entered `state` (seconds since the epoch).

    `clients` counts connected processes, None if that was not asked yet. `problem` is one sentence for a person.
    `users` are the user IDs of the processes that have the daemon's pipe directory, looked up for daemons that serve
    one user at a time. `not_exclusive` are the UUIDs of GPUs that have no exclusive compute mode. `directory` is the
    path of the daemon's directory on the host, which need not have the name of the device.
    """

    device: str
    state: MpsState
    spec: MpsDaemonSpec
    pid: int | None = None
    since: float = 0.0
    clients: int | None = None
    problem: str | None = None
    users: tuple[int, ...] = ()
    not_exclusive: tuple[str, ...] = ()
    directory: str = ""


@dataclass(frozen=True, slots=True)
class MpsDirectories:
    """The directories that a daemon shares with its clients, as absolute paths on the host. `shm` becomes the clients'
    /dev/shm."""

    pipe: str
    log: str
    shm: str


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(item.device for item in value) or "none"
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
