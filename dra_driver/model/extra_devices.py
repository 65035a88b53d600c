"""Extra devices, which containers get beside their GPU: IMEX channels, nodes of RDMA, storage, NVSwitches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

HostDevice = Literal["gds", "mofed", "gdrcopy", "nvswitch"]
HOST_DEVICES: Final[tuple[HostDevice, ...]] = get_args(HostDevice)
"""In the order in which users see them. The names are the modes of NVIDIA's container toolkit."""

ImexChannels = int | Literal["all"]
"""The number of one channel, or all that the NVIDIA driver has."""
LAST_IMEX_CHANNEL: Final = (1 << 20) - 1
"""Linux has 20 bits for a minor number."""
MOST_IMEX_CHANNELS: Final = 4096
"""More device nodes than these are too many for one container."""

NODE_PATTERNS: Final[Mapping[HostDevice, tuple[str, ...]]] = {
    "gds": ("/dev/nvidia-fs*",),
    "mofed": ("/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"),
    "gdrcopy": ("/dev/gdrdrv",),
    "nvswitch": ("/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch*"),
}
"""Paths on the host; only the last part has a `*`."""
FILES: Final[Mapping[HostDevice, tuple[str, ...]]] = {"gds": ("/run/udev", "/etc/cufile.json")}
"""What a container needs besides, as far as the host has it: cuFile asks udev for disks."""
REMEDIES: Final[Mapping[HostDevice, str]] = {
    "gds": "`modprobe nvidia-fs` on the node",
    "mofed": "load the RDMA drivers on the node (`modprobe ib_uverbs rdma_ucm`)",
    "gdrcopy": "`modprobe gdrdrv` on the node, and start the service gdrcopy",
    "nvswitch": "start nvidia-fabricmanager on the node",
}

FABRIC_REMEDY: Final = (
    "look at `nvidia-smi -q | grep -A4 Fabric` and `nvidia-smi nvlink -s` on the node, and at nvidia-fabricmanager, "
    "which runs on the node or on the NVLink switches of the rack"
)
"""For a GPU that is not registered with its NVLink fabric: whether it gets IMEX channels is not known until then."""


@dataclass(frozen=True, slots=True)
class ExtraDevices:
    """What the node's configuration gives to every claim: `imex` channels only to claims on GPUs in a fabric."""

    imex: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()


NO_EXTRA_DEVICES: Final = ExtraDevices()


def in_order(names: Iterable[str]) -> tuple[HostDevice, ...]:
    """The known names, each once."""
    given = frozenset(names)
    return tuple(name for name in HOST_DEVICES if name in given)
