"""Which devices several claims may share, how, and what enforces the limits."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Literal, assert_never

from dra_driver.model.claim import DeviceKind
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice, StaticMigDevice, VfioDevice, WholeGpu

SharingRuleMode = Literal["shares", "memory", "unlimited"]
Enforcement = Literal["mps", "none"]
SelectedDevices = Literal["gpu", "mig", "all"]

MAX_SHARES = 4096
MAX_MPS_SHARES = 60
"""With the newest NVIDIA drivers; `sharing/rules/client_limits.py` has the node's limit."""

_UUID = re.compile(r"^(?:GPU|MIG)-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\Z")


@dataclass(frozen=True, slots=True)
class SharingRule:
    """`shares` is the number of equal parts in mode `shares`. With `multiprocessors`, a claim may also
    request a number of those. If `enforce` is `none`, nothing enforces the limits of shares. `multi_user`
    lets pods of different users run at the same time, if MPS supports it.
    """

    mode: SharingRuleMode
    shares: int | None = None
    enforce: Enforcement = "none"
    multiprocessors: bool = False
    multi_user: bool = True


@dataclass(frozen=True, slots=True)
class GpuSelector:
    """All fields must match; an empty field matches everything, an unknown property nothing.

    `product_name` is a case-insensitive pattern with `*`, `?` and `[…]`; `uuids` are of GPUs or MIG devices;
    `pci_bus_ids` are in sysfs form.
    """

    product_name: str | None = None
    uuids: frozenset[str] = frozenset()
    pci_bus_ids: frozenset[str] = frozenset()
    devices: SelectedDevices = "all"

    def matches(self, device: OfferedDevice) -> bool:
        return self.devices in ("all", kind_of(device)) and self._matches(device.gpu, device.uuid)

    def matches_gpu(self, gpu: Gpu) -> bool:
        """Ignore `devices`. UUIDs of MIG devices match no GPU."""
        return self._matches(gpu, gpu.uuid)

    def _matches(self, gpu: Gpu, device_uuid: str) -> bool:
        if self.product_name is not None:
            name = (gpu.product_name or "").lower()
            if not name or not fnmatchcase(name, self.product_name.lower()):
                return False
        if self.uuids and not {gpu.uuid.lower(), device_uuid.lower()} & {uuid.lower() for uuid in self.uuids}:
            return False
        return not self.pci_bus_ids or gpu.pci_bus_id in self.pci_bus_ids

    def covers(self, other: GpuSelector) -> bool:
        """Whether this selects all that `other` selects; False if the patterns do not prove it."""
        return (
            self.devices in ("all", other.devices)
            and self.product_name in (None, "*", other.product_name)
            and (not self.uuids or (bool(other.uuids) and other.uuids <= self.uuids))
            and (not self.pci_bus_ids or (bool(other.pci_bus_ids) and other.pci_bus_ids <= self.pci_bus_ids))
        )


@dataclass(frozen=True, slots=True)
class SharingEntry:
    """Without a `rule`, one claim at a time uses the device."""

    selector: GpuSelector
    rule: SharingRule | None


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """The first entry that selects a device applies."""

    entries: tuple[SharingEntry, ...] = ()

    def rule_for(self, device: OfferedDevice) -> SharingRule | None:
        """Return None if the device is exclusive, as GPUs for virtual machines are."""
        if isinstance(device, VfioDevice):
            return None
        for entry in self.entries:
            if entry.selector.matches(device):
                return entry.rule
        return None


NO_SHARING = SharingPolicy()


def share_all(rule: SharingRule) -> SharingPolicy:
    return SharingPolicy((SharingEntry(GpuSelector(), rule),))


def kind_of(device: OfferedDevice) -> DeviceKind:
    match device:
        case WholeGpu():
            return "gpu"
        case StaticMigDevice() | DynamicMigDevice():
            return "mig"
        case VfioDevice():
            return "vfio"
        case _:
            assert_never(device)


def is_device_uuid(text: str) -> bool:
    return _UUID.fullmatch(text) is not None
