"""How a claim shares a device (time-slicing or MPS), and MPS daemons: desired settings, state, and
directories.
"""

from __future__ import annotations

from typing import Literal

from dra_driver.model.dataclass import dataclass, fields

MpsKind = Literal["gpu", "mig"]
MpsState = Literal["starting", "ready", "fault", "stopped", "failed"]

MPS_STATES: tuple[MpsState, ...] = ("starting", "ready", "fault", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class MpsMember:
    """An additional whole GPU of an MPS daemon that serves several GPUs."""

    device: str
    gpu_uuid: str
    default_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class MpsDaemonSpec:
    """The settings of the control daemon of one GPU or MIG device, or of several whole GPUs.

    `device` is the device's name, `uuid` its own UUID and `gpu_uuid` that of its GPU (the same for a whole
    GPU). `multi_user` lets clients of different users share a server; it requires Volta or newer and NVIDIA
    driver R555 or newer. Without `multi_user`, the daemon serves one user at a time. The default limits apply to
    clients without a tighter limit; None keeps the defaults of MPS: all threads, all memory.

    A daemon of several GPUs is named after the GPU with the lowest UUID; `others` are its other GPUs, in order of
    their UUIDs. The daemon's clients number the GPUs in this order. An MPS host of an older release rejects
    `others`.
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
        """The names of all devices that the daemon serves, in the clients' order."""
        return (self.device, *(other.device for other in self.others))

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPU UUIDs of `devices`."""
        return (self.gpu_uuid, *(other.gpu_uuid for other in self.others))

    @property
    def visible(self) -> str:
        """The daemon's CUDA_VISIBLE_DEVICES."""
        return ",".join((self.uuid, *(other.gpu_uuid for other in self.others)))

    @property
    def default_memory_limits_mib(self) -> tuple[int | None, ...]:
        """The default memory limit of each of `devices`."""
        return (self.default_memory_limit_mib, *(other.default_memory_limit_mib for other in self.others))

    def differences(self, other: MpsDaemonSpec) -> tuple[str, ...]:
        """Return the differences, each as `name: mine, not theirs`; empty if both are equal."""
        pairs = (
            (entry.name, getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)
        )
        return tuple(
            f"{name}: {_shown(mine)}, not {_shown(theirs)}" for name, mine, theirs in pairs if mine != theirs
        )


@dataclass(frozen=True, slots=True)
class MpsDaemonStatus:
    """The last known state of a control daemon. `since` is when the daemon entered `state` (seconds since 1970).

    `clients` counts connected processes, None if unknown. `problem` is one sentence for a person.
    `users` are the user IDs of the processes that use the daemon's pipe directory, read only for daemons that
    serve one user at a time. `not_exclusive` are the UUIDs of GPUs without exclusive compute mode.
    `directory` is the path of the daemon's directory on the host; its name may differ from the device's name.
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
    """The directories that a daemon shares with its clients, as absolute host paths. `shm` is mounted at the
    clients' /dev/shm.
    """

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
    """The claim shares the device by time-slicing. `interval` is the NVIDIA driver's level: 0 is the default, None
    keeps the current level.
    """

    interval: int | None = None


@dataclass(frozen=True, slots=True)
class MpsShared:
    """The claim shares the device through the device's MPS daemon, with these limits; None means unlimited.

    Limits apply to each process of the claim's containers, as MPS defines them. `memory_limits_mib` has the
    limits for all devices of a daemon with several GPUs, in the daemon's order; otherwise it is empty.
    """

    spec: MpsDaemonSpec
    memory_limit_mib: int | None = None
    active_thread_percentage: int | None = None
    memory_limits_mib: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class LostMps:
    """The claim shares the device through an MPS daemon whose settings only the MPS host knows, because the
    claim's record was lost.
    """


SharingMode = TimeSliced | MpsShared | LostMps | None


def usage_kind(usage: SharingMode) -> str:
    """Return the mode's name for messages."""
    match usage:
        case TimeSliced():
            return "time-slicing"
        case MpsShared() | LostMps():
            return "MPS"
        case None:
            return "no sharing"
