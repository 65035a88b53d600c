"""Values read from the host: device nodes, and where the host's directories are seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NodeType = Literal["b", "c", "u", "p"]


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node: `path` as containers see it, `mode` holds the permission bits only.

    MIG capability nodes are described from /proc and need not exist on the host.
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
    """Where this process sees the host.

    `driver_root` is the NVIDIA driver's installation as this process sees it, `host_driver_root` the same directory as
    the container runtime sees it. `host_root` is where this process sees the host's `/`, None if it does not see it.
    `dev_root` holds `dev/`; None means the driver root if that has the NVIDIA nodes, else `/`. `plugin_directory` is
    this plugin's own directory below the kubelet's, with the same path here and on the host; None if there is none."""

    driver_root: str = "/"
    host_driver_root: str = "/"
    dev_root: str | None = None
    proc: str = "/proc"
    sys: str = "/sys"
    host_root: str | None = None
    plugin_directory: str | None = None


@dataclass(frozen=True, slots=True)
class PciFunction:
    """A PCI function; `bus_id` in sysfs form, `class_code` has 24 bits, `driver` is the kernel driver that is bound to
    it. `physical` is the bus ID of the function of which it is a virtual one (SR-IOV)."""

    bus_id: str
    vendor_id: int
    device_id: int
    class_code: int
    driver: str | None = None
    physical: str | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a VGA or 3D controller. NVSwitches, audio and USB functions are not, nor are the virtual
        functions (SR-IOV) of a GPU, which NVML does not show."""
        return self.class_code >> 8 in {0x0300, 0x0302} and self.physical is None
