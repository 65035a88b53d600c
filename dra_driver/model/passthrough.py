"""A GPU as a PCI function that a virtual machine can get (VFIO)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

VFIO_PCI = "vfio-pci"


def is_vfio(driver: str | None) -> bool:
    """Whether a kernel driver is one for virtual machines, by its name: those for certain GPUs have longer ones."""
    return "vfio" in (driver or "")


def uuid_of_bus_id(bus_id: str) -> str:
    """The UUID by which a card is known whoever has it: that of its bus ID as a name of the DNS."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, bus_id))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a PCI function, with all functions of its IOMMU group that go with it.

    Bus IDs are in sysfs form, such as `0000:1b:00.0`. `gpu_uuid` is what lanes, records and locks know the card by:
    NVML's UUID where that is known, else a UUID made of the bus ID. `functions` are those of the group in bus order,
    the GPU included, bridges left out. `vfio_driver` is the kernel driver for it: `vfio-pci`, or the variant that the
    kernel names for this GPU; `driver` is the one that has it now, None if none has. `by_us` says that this plugin
    gave it to its vfio driver in this boot. `addressable_memory` is in bytes: the 64-bit memory regions together,
    rounded up to a power of two. `problem` is one sentence on why no virtual machine can get the card; such a card is
    not offered.
    """

    bus_id: str
    gpu_uuid: str
    device_id: int
    iommu_group: int
    functions: tuple[str, ...]
    vfio_driver: str
    driver: str | None
    has_iommufd: bool
    by_us: bool = False
    product_name: str | None = None
    addressable_memory: int | None = None
    pcie_root: str | None = None
    numa_node: int | None = None
    problem: str | None = None

    @property
    def is_bound(self) -> bool:
        """Whether a vfio driver has the card."""
        return self.driver in (self.vfio_driver, VFIO_PCI)


@dataclass(frozen=True, slots=True)
class FunctionBefore:
    """A PCI function of a card with the kernel driver and the `driver_override` that it had, None for none."""

    bus_id: str
    driver: str | None
    override: str | None = None


@dataclass(frozen=True, slots=True)
class OwnedCard:
    """What the ledger says of a card that this plugin bound to a vfio driver in boot `boot_id`, or is about to.

    `functions` are those of its IOMMU group in bus order. `persistence` is the persistence mode that the GPU had, None
    where it has none. `product_name` is what only the NVIDIA driver knows.
    """

    gpu_uuid: str
    pci_bus_id: str
    boot_id: str
    functions: tuple[FunctionBefore, ...]
    persistence: bool | None
    product_name: str | None = None
