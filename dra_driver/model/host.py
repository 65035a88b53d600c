"""The host: device nodes, PCI functions, paths of its directories, fingerprints that reveal hardware changes,
and the devices that containers get in addition to GPUs (IMEX channels, RDMA, storage, NVSwitches).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Literal, get_args

from dra_driver.model.dataclass import dataclass, field

NodeType = Literal["b", "c", "u", "p"]


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node: `path` as containers see it, `mode` with the permission bits only.

    MIG capability nodes are derived from /proc and need not exist on the host.
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

    `driver_root` is the NVIDIA driver's installation as this process sees it, `host_driver_root` the same
    directory as the container runtime sees it. `host_root` is where this process sees the host's `/`, None if
    it does not see it. `dev_root` holds `dev/`; None means the driver root if its `dev/` has the NVIDIA nodes,
    else `/`. `plugin_directory` is this plugin's own directory below the kubelet's, with the same path in the
    container and on the host; None if the process has no such directory.
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
    """A PCI function. `bus_id` is in sysfs form, `class_code` has 24 bits, `driver` is the bound kernel
    driver.

    `physical` is the bus ID of the physical function if this is a virtual one (SR-IOV).
    """

    bus_id: str
    vendor_id: int
    device_id: int
    class_code: int
    driver: str | None = None
    physical: str | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether this is a physical VGA or 3D controller: no NVSwitch, audio or USB function, and no virtual
        function (SR-IOV), which NVML does not list.
        """
        return self.class_code >> 8 in {0x0300, 0x0302} and self.physical is None


@dataclass(frozen=True, slots=True)
class HostFingerprint:
    """The state of the host's kernel, to detect changes.

    `hardware` changes when a GPU or other NVIDIA PCI function appears, disappears, is bound to the NVIDIA driver or
    unbound from it. `driver` changes when another driver is loaded; it is empty if none is loaded. `instances` maps
    the minor number of each GPU to a value that changes when a GPU instance or compute instance appears or disappears.
    """

    hardware: Hashable
    driver: str
    instances: Mapping[int, Hashable]


@dataclass(frozen=True, slots=True)
class GpuFingerprint:
    """A GPU that NVML lists, with `values` of the fields of `Gpu` that are kept current. A GPU that hangs has its last
    fingerprint, or an empty `uuid` if it never had one.
    """

    uuid: str
    values: Mapping[str, Hashable] = field(default_factory=dict)


NvmlFingerprint = tuple[GpuFingerprint | None, ...]
"""One entry for each GPU in NVML's order, None for a GPU that is lost or whose queries fail."""


HostDevice = Literal["gds", "mofed", "gdrcopy", "nvswitch"]
HOST_DEVICES: Final[tuple[HostDevice, ...]] = get_args(HostDevice)
"""In display order. The names are the modes of NVIDIA's container toolkit."""

ImexChannels = int | Literal["all"]
"""The number of one channel, or all channels of the NVIDIA driver."""
LAST_IMEX_CHANNEL: Final = (1 << 20) - 1
"""Linux uses 20 bits for a minor number."""
MAX_IMEX_CHANNELS: Final = 4096
"""A larger number of device nodes is impractical for one container."""

HOST_DEVICE_NODES: Final[Mapping[HostDevice, tuple[str, ...]]] = {
    "gds": ("/dev/nvidia-fs*",),
    "mofed": ("/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"),
    "gdrcopy": ("/dev/gdrdrv",),
    "nvswitch": ("/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch*"),
}
"""Host paths; only the last component can have a `*`."""
HOST_DEVICE_FILES: Final[Mapping[HostDevice, tuple[str, ...]]] = {"gds": ("/run/udev", "/etc/cufile.json")}
"""Other files that a container needs, if the host has them: cuFile queries udev about disks."""
HOST_DEVICE_REMEDIES: Final[Mapping[HostDevice, str]] = {
    "gds": "`modprobe nvidia-fs` on the node",
    "mofed": "load the RDMA drivers on the node (`modprobe ib_uverbs rdma_ucm`)",
    "gdrcopy": "`modprobe gdrdrv` on the node, and start the service gdrcopy",
    "nvswitch": "start nvidia-fabricmanager on the node",
}


@dataclass(frozen=True, slots=True)
class ExtraDevices:
    """The devices that the node's configuration adds to every claim; `imex` only to claims on GPUs in a fabric."""

    imex: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()


NO_EXTRA_DEVICES: Final = ExtraDevices()


def in_order(names: Iterable[str]) -> tuple[HostDevice, ...]:
    """Return the known names in display order, without duplicates."""
    given = frozenset(names)
    return tuple(name for name in HOST_DEVICES if name in given)
