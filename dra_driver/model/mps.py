"""How claims share a device, and MPS daemons."""

from __future__ import annotations

from typing import Literal

from dra_driver.model.dataclass import dataclass, fields

MpsKind = Literal["gpu", "mig"]
MpsState = Literal["starting", "ready", "fault", "stopped", "failed"]

MPS_STATES: tuple[MpsState, ...] = ("starting", "ready", "fault", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class MpsMember:
    device: str
    gpu_uuid: str
    default_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class MpsDaemonSpec:
    """The control daemon of one GPU or MIG device, or of several whole GPUs.

    `uuid` is the device's own. `multi_user` lets clients of different users share a server; it requires Volta
    and NVIDIA driver R555, or newer. Without it, the daemon serves one user at a time. The default limits
    apply to clients without a tighter limit; None means all threads, all memory.

    A daemon of several GPUs is named after the GPU with the lowest UUID; `others` follow in order of their
    UUIDs, in which the clients number the GPUs. An MPS host of an older release rejects `others`.
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
        """In the clients' order."""
        return (self.device, *(other.device for other in self.others))

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return (self.gpu_uuid, *(other.gpu_uuid for other in self.others))

    @property
    def visible(self) -> str:
        """For CUDA_VISIBLE_DEVICES."""
        return ",".join((self.uuid, *(other.gpu_uuid for other in self.others)))

    @property
    def default_memory_limits_mib(self) -> tuple[int | None, ...]:
        return (self.default_memory_limit_mib, *(other.default_memory_limit_mib for other in self.others))

    def differences(self, other: MpsDaemonSpec) -> tuple[str, ...]:
        """Return each as `name: mine, not theirs`."""
        pairs = (
            (entry.name, getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)
        )
        return tuple(
            f"{name}: {_shown(mine)}, not {_shown(theirs)}" for name, mine, theirs in pairs if mine != theirs
        )


@dataclass(frozen=True, slots=True)
class MpsDaemonStatus:
    """The daemon entered `state` at `since` (seconds since 1970).

    `clients` counts processes. `users` are the user IDs of the processes that use the daemon's pipe
    directory, read only for daemons that serve one user at a time. `not_exclusive` are GPUs without exclusive
    compute mode. The name of `directory`, a host path, may differ from the device's.
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
    """Host paths that a daemon shares with its clients. `shm` is their /dev/shm."""

    pipe: str
    log: str
    shm: str


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(item.device for item in value) or "none"
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


INTERVALS: tuple[str, ...] = ("Default", "Short", "Medium", "Long")
"""The NVIDIA driver's levels 0 to 3."""


@dataclass(frozen=True, slots=True)
class TimeSliced:
    """`interval` is a level: 0 is the default, None keeps the current one."""

    interval: int | None = None


@dataclass(frozen=True, slots=True)
class MpsShared:
    """MPS applies the limits to each process; None means unlimited. `memory_limits_mib` has those of a daemon
    with several GPUs, in its order; otherwise it is empty.
    """

    spec: MpsDaemonSpec
    memory_limit_mib: int | None = None
    active_thread_percentage: int | None = None
    memory_limits_mib: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class LostMps:
    """The claim's record was lost, so that only the MPS host knows the settings."""


SharingMode = TimeSliced | MpsShared | LostMps | None


def usage_kind(usage: SharingMode) -> str:
    match usage:
        case TimeSliced():
            return "time-slicing"
        case MpsShared() | LostMps():
            return "MPS"
        case None:
            return "no sharing"
