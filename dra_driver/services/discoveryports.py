"""What discovery needs of NVML and of the host."""

from __future__ import annotations

from typing import Protocol

from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance
from dra_driver.model.pulse import Pulse
from dra_driver.services.signs import SignSource


class Nvml(Protocol):
    """The NVML session and what is read through it."""

    def reopen(self) -> None:
        """Initialise anew. Raises: NvmlInUseError, with all as it was, if that cannot be now."""

    def close(self) -> None:
        """Shut down."""

    def read_inventory(self) -> Inventory:
        """All GPUs that NVML shows."""

    def read_what_exists(self, gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        """Whether a partitioned GPU is in MIG mode, and every GPU instance on it."""

    def pulse(self) -> Pulse:
        """A cheap value that differs when a GPU was lost (None in its place) or changed its MIG mode."""


class HostTopology(SignSource, Protocol):
    """What the host's sysfs and procfs tell about PCI functions."""

    def pcie_root(self, bus_id: str) -> str | None:
        """`pci0000:16`, or None."""

    def numa_node(self, bus_id: str) -> int | None:
        """The NUMA node, or None."""

    def gpu_functions(self) -> frozenset[str]:
        """Bus IDs of the NVIDIA functions that are display or 3D controllers."""

    def is_bound(self, bus_id: str) -> bool:
        """Whether the function is there and the NVIDIA driver's."""
