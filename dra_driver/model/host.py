"""The host: device nodes, PCI functions, directories, fingerprints, extra devices."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Literal, get_args

from dra_driver.model.dataclass import dataclass, field

NodeType = Literal["b", "c", "u", "p"]


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """`path` is the container's, `mode` only the permission bits. MIG capability nodes need not exist on the
    host.
    """

    path: str
    type: NodeType = "c"
    major: int = 0
    minor: int = 0
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where this process sees the host's directories.

    `host_driver_root` is for the container runtime. `dev_root` holds `dev/`; None means the driver root if
    its `dev/` has the NVIDIA nodes, else `/`. `plugin_directory` has the same path on the host.
    """

    driver_root: str = "/"
    host_driver_root: str = "/"
    dev_root: str | None = None
    proc: str = "/proc"
    sys: str = "/sys"
    host_root: str | None = None
    plugin_directory: str | None = None


@dataclass(frozen=True, slots=True)
class PciFunction:
    """`bus_id` is in sysfs form, `class_code` has 24 bits. A virtual function (SR-IOV), which NVML does not
    list, has a `physical` one.
    """

    bus_id: str
    vendor_id: int
    device_id: int
    class_code: int
    driver: str | None = None
    physical: str | None = None

    @property
    def is_gpu(self) -> bool:
        return self.class_code >> 8 in {0x0300, 0x0302} and self.physical is None


@dataclass(frozen=True, slots=True)
class HostFingerprint:
    """`hardware` changes when an NVIDIA PCI function appears, disappears, or is bound to or unbound from the
    NVIDIA driver. `driver` is empty if none is loaded. `instances` has for each minor number a value that
    changes with the GPU's instances.
    """

    hardware: Hashable
    driver: str
    instances: Mapping[int, Hashable]


@dataclass(frozen=True, slots=True)
class GpuFingerprint:
    """`values` are the fields of `Gpu` that are kept current. A GPU that hangs has its last fingerprint, or
    an empty `uuid`.
    """

    uuid: str
    values: Mapping[str, Hashable] = field(default_factory=dict)


NvmlFingerprint = tuple[GpuFingerprint | None, ...]
"""In NVML's order; None for a GPU that is lost or whose queries fail."""


HostDevice = Literal["gds", "mofed", "gdrcopy", "nvswitch"]
HOST_DEVICES: Final[tuple[HostDevice, ...]] = get_args(HostDevice)
"""In display order, with names from NVIDIA's container toolkit."""

ImexChannels = int | Literal["all"]
"""A channel's number, or all channels of the NVIDIA driver."""
LAST_IMEX_CHANNEL: Final = (1 << 20) - 1
"""Linux has 20 bits for a minor number."""
MAX_IMEX_CHANNELS: Final = 4096
"""More is impractical for one container."""

HOST_DEVICE_NODES: Final[Mapping[HostDevice, tuple[str, ...]]] = {
    "gds": ("/dev/nvidia-fs*",),
    "mofed": ("/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"),
    "gdrcopy": ("/dev/gdrdrv",),
    "nvswitch": ("/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch*"),
}
"""Only the last component can have a `*`."""
HOST_DEVICE_FILES: Final[Mapping[HostDevice, tuple[str, ...]]] = {"gds": ("/run/udev", "/etc/cufile.json")}
"""Containers get these if the host has them: cuFile queries udev about disks."""
HOST_DEVICE_REMEDIES: Final[Mapping[HostDevice, str]] = {
    "gds": "`modprobe nvidia-fs` on the node",
    "mofed": "load the RDMA drivers on the node (`modprobe ib_uverbs rdma_ucm`)",
    "gdrcopy": "`modprobe gdrdrv` on the node, and start the service gdrcopy",
    "nvswitch": "start nvidia-fabricmanager on the node",
}


@dataclass(frozen=True, slots=True)
class ExtraDevices:
    """What the node's configuration adds to claims for containers; `imex` only to claims on GPUs in a fabric."""

    imex: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()


NO_EXTRA_DEVICES: Final = ExtraDevices()


def in_order(names: Iterable[str]) -> tuple[HostDevice, ...]:
    """Return the known names in display order."""
    given = frozenset(names)
    return tuple(name for name in HOST_DEVICES if name in given)
