"""What discovery wants to know of the host, from the host room."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from dra_driver.host.fingerprint import HardwareFingerprint, driver_fingerprint, instance_fingerprint
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.host import HostPaths


class HostView:
    """PCI places and the change fingerprints of one host."""

    def __init__(self, paths: HostPaths) -> None:
        self._paths = paths
        self._sysfs = Sysfs(paths.sys, paths.proc)
        self._hardware = HardwareFingerprint(paths.sys, paths.proc)

    def pcie_root(self, bus_id: str) -> str | None:
        """`pci0000:16`, or None in a VM without PCIe parents."""
        return self._sysfs.pcie_root(bus_id)

    def numa_node(self, bus_id: str) -> int | None:
        """The NUMA node, or None."""
        return self._sysfs.numa_node(bus_id)

    def gpu_functions(self) -> frozenset[str]:
        """Bus IDs of NVIDIA functions that are VGA or 3D controllers."""
        return self._sysfs.gpu_functions()

    def is_bound(self, bus_id: str) -> bool:
        """Whether the function is there and the NVIDIA driver's."""
        return self._sysfs.bound_driver(bus_id) == "nvidia"

    def hardware(self) -> Hashable:
        """A value that differs when a GPU or a PCI function of NVIDIA's came or went."""
        return self._hardware.read()

    def driver(self) -> str:
        """A value that differs when another driver was loaded; empty while none is."""
        return driver_fingerprint(self._paths.proc)

    def instances(self) -> Mapping[int, Hashable]:
        """By the minor number of a GPU, a value that differs when a MIG device of it came or went."""
        return instance_fingerprint(self._paths.proc)
