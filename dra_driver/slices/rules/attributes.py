"""Converts a device to the form of resource.k8s.io/v1: its attributes and capacities.

Names and types are those of NVIDIA's own driver, because users' CEL selectors and other schedulers depend on them.
Unknown values are omitted, never 0 or "N/A".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from dra_driver.mig.rules.counters import has_counters
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import (
    DynamicMigDevice,
    Inventory,
    OfferedDevice,
    StaticMigDevice,
    VfioDevice,
    WholeGpu,
)
from dra_driver.model.mig import MigProfile
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import format_bytes
from dra_driver.sharing.rules import shared_device
from dra_driver.sharing.rules.client_limits import BoundedRule
from dra_driver.sharing.rules.shared_device import MEMORY, MULTIPROCESSORS, SHAREABLE, shared_capacity

_LEADING_NUMBERS = re.compile(r"^v?(\d+(?:\.\d+)*)")

MAX_ATTRIBUTES_AND_CAPACITIES: Final = 32
MAX_STRING_BYTES = 64
_MIB = 1 << 20


_Kind = type[WholeGpu] | type[StaticMigDevice] | type[DynamicMigDevice] | type[VfioDevice]
_KINDS: Final[tuple[_Kind, ...]] = (WholeGpu, StaticMigDevice, DynamicMigDevice, VfioDevice)


@dataclass(frozen=True, slots=True)
class Entry:
    """An attribute or capacity, and how it is found for each kind of device: `both` are whole GPUs and MIG devices,
    `static` MIG devices exist already. A function returns None if the value is unknown.
    """

    name: str
    type: Literal["string", "int", "bool", "version", "count", "bytes"]
    says: str = ""
    both: Callable[[WholeGpu | StaticMigDevice | DynamicMigDevice, Inventory], Any] | None = None
    gpu: Callable[[WholeGpu, Inventory], Any] | None = None
    mig: Callable[[StaticMigDevice | DynamicMigDevice, Inventory], Any] | None = None
    static: Callable[[StaticMigDevice, Inventory], Any] | None = None
    vfio: Callable[[VfioDevice, Inventory], Any] | None = None

    @property
    def is_capacity(self) -> bool:
        return self.type in ("count", "bytes")

    def of(self, kind: _Kind) -> Callable[[Any, Inventory], Any] | None:
        of_kind = {
            WholeGpu: self.gpu or self.both,
            StaticMigDevice: self.static or self.mig or self.both,
            DynamicMigDevice: self.mig or self.both,
            VfioDevice: self.vfio,
        }
        return of_kind[kind]


_Found = tuple[tuple[Entry, Callable[[Any, Inventory], Any]], ...]


def _engines(name: str, count: Callable[[MigProfile], int]) -> Entry:
    return Entry(
        name,
        "count",
        _OF_PROFILE,
        gpu=lambda device, _: _most(device.gpu, count),
        mig=lambda device, _: count(device.profile),
    )


def _most(gpu: Gpu, count: Callable[[MigProfile], int]) -> int | None:
    if gpu.partitioning is None or not has_counters(gpu):
        return None
    return max(count(row.profile) for row in gpu.partitioning.profiles)


def _memory_slice(number: int) -> Entry:
    return Entry(
        f"memorySlice{number}",
        "count",
        "1 for each slice of the placement; absent on demand",
        static=lambda device, _: 1 if number in device.placement.memory_slices else None,
    )


def _minor(gpu: Gpu) -> int | None:
    """Return None with MIG on demand: MIG mode changes the minor number, and claims change the mode."""
    return gpu.minor if gpu.partitioning is None else None


def _limits(gpu: Gpu) -> tuple[int | None, int | None]:
    return gpu.power_limits_w or (None, None)


def _bus_id(bus_id: str | None) -> str | None:
    """Return None for a domain of more than four digits, which the standard attribute does not allow."""
    return bus_id if bus_id is not None and len(bus_id) == len("0000:00:00.0") else None


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


_STANDARD: Final = "resource.kubernetes.io/"
_IF_SHARED: Final = "if the device is [shared](configuration.md#sharing-one-device-among-several-claims)"
_IN_FABRIC: Final = "in a [multi-node fabric](imex.md)"
_IN_RACK: Final = "in a rack such as GB200 NVL72"
_OF_PROFILE: Final = "of a MIG device's profile; of a GPU only with MIG devices on demand"

ENTRIES: Final = (
    # What the scheduler and quotas count, and what a device is.
    Entry(MEMORY, "bytes", "of the GPU, or of the MIG device's profile",
          gpu=lambda device, _: device.gpu.memory_bytes, mig=lambda device, _: device.profile.memory_mib * _MIB),
    Entry(shared_device.SHARES, "count", _IF_SHARED),
    Entry(shared_device.MPS_CLIENTS, "count", _IF_SHARED),
    Entry(MULTIPROCESSORS, "count", _OF_PROFILE,
          gpu=lambda device, _: _most(device.gpu, lambda one: device.gpu.multiprocessors or one.multiprocessors),
          mig=lambda device, _: device.profile.multiprocessors),
    Entry("addressableMemory", "bytes", "the sum of the GPU's 64-bit memory regions, rounded up to a power of two",
          vfio=lambda device, _: device.card.addressable_memory),
    Entry("type", "string", "`gpu`, `mig` or `vfio`",
          gpu=lambda *_: "gpu", mig=lambda *_: "mig", vfio=lambda *_: "vfio"),
    Entry("uuid", "string", "`GPU-…`; `MIG-…`, absent on demand; VFIO: made from the PCI bus ID, without a prefix",
          gpu=lambda device, _: device.gpu.uuid, mig=lambda device, _: device.uuid, vfio=lambda device, _: device.uuid),
    Entry("profile", "string", mig=lambda device, _: device.profile.name),
    Entry("parentUUID", "string", mig=lambda device, _: device.gpu.uuid),
    Entry("productName", "string", "VFIO: only while it is bound to the NVIDIA driver",
          both=lambda device, _: device.gpu.product_name,
          vfio=lambda device, _: device.card.product_name or device.gpu.product_name),
    Entry(_STANDARD + "pciBusID", "string", both=lambda device, _: _bus_id(device.gpu.pci_bus_id),
          vfio=lambda device, _: _bus_id(device.card.bus_id)),
    Entry(_STANDARD + "pcieRoot", "string", both=lambda device, _: device.gpu.pcie_root,
          vfio=lambda device, _: device.card.pcie_root),
    Entry("driverVersion", "version", "SemVer: `570.124.06` is `570.124.6`", both=lambda _, node: node.versions.driver),
    Entry("cudaComputeCapability", "version", both=lambda device, _: _dotted(device.gpu.cuda_compute_capability)),
    Entry("architecture", "string", both=lambda device, _: device.gpu.architecture),
    Entry(_STANDARD + "numaNode", "int", both=lambda device, _: device.gpu.numa_node,
          vfio=lambda device, _: device.card.numa_node),
    Entry("deviceID", "string", "such as `0x2330`", vfio=lambda device, _: f"0x{device.card.device_id:04x}"),
    Entry("vendorID", "string", "`0x10de`", vfio=lambda *_: "0x10de"),
    # Rarely selected.
    _engines("copyEngines", lambda profile: profile.copy_engines),
    _engines("decoders", lambda profile: profile.decoders),
    _engines("encoders", lambda profile: profile.encoders),
    _engines("jpegEngines", lambda profile: profile.jpeg_engines),
    _engines("ofaEngines", lambda profile: profile.ofa_engines),
    *(_memory_slice(number) for number in range(MAX_ATTRIBUTES_AND_CAPACITIES)),
    Entry("cudaDriverVersion", "version", both=lambda _, node: _dotted(node.versions.cuda)),
    Entry("brand", "string", both=lambda device, _: device.gpu.brand),
    Entry("iommuFDEnabled", "bool", "the host has `/dev/iommu`", vfio=lambda device, _: device.card.has_iommufd),
    Entry("addressingMode", "string", both=lambda device, _: device.gpu.addressing_mode),
    # Not published by NVIDIA's driver.
    Entry("nvlinkDomain", "string", "for `matchAttribute`",
          gpu=lambda device, node: node.nvlink_domains.get(device.gpu.uuid)),
    Entry("fabricClusterUUID", "string", _IN_FABRIC,
          gpu=lambda device, _: device.gpu.fabric and device.gpu.fabric.cluster_uuid),
    Entry("fabricCliqueID", "int", _IN_FABRIC, gpu=lambda device, _: device.gpu.fabric and device.gpu.fabric.clique_id),
    Entry("confidentialCompute", "string", "[`off`, `on`, `devtools`, `ppcie`](health.md#confidential-computing)",
          both=lambda _, node: node.confidential_compute),
    Entry("iommuGroup", "int", vfio=lambda device, _: device.card.iommu_group),
    Entry("imexChannels", "int", "channels of the NVIDIA driver, if [`imex`](imex.md) is on",
          gpu=lambda device, node: device.gpu.fabric and node.imex_channels),
    Entry("nvlinkLinks", "int", "active links", gpu=lambda device, _: device.gpu.nvlink_links),
    Entry("migCapable", "bool", gpu=lambda device, _: device.gpu.mig_capable),
    Entry("powerLimitDefaultWatts", "int", "of the product",
          gpu=lambda device, _: device.gpu.power_limit_default_w),
    Entry("powerLimitMinWatts", "int", gpu=lambda device, _: _limits(device.gpu)[0]),
    Entry("powerLimitMaxWatts", "int", gpu=lambda device, _: _limits(device.gpu)[1]),
    Entry("parentIndex", "int", mig=lambda device, _: device.gpu.index),
    Entry("index", "int", gpu=lambda device, _: device.gpu.index),
    Entry("parentMinor", "int", "absent with MIG on demand", mig=lambda device, _: _minor(device.gpu)),
    Entry("minor", "int", "absent with MIG on demand", gpu=lambda device, _: _minor(device.gpu)),
    Entry(SHAREABLE, "bool", "`true` if the section `sharing` selects the device, else absent"),
    # Where the GPU is. Last, because these were added last: no attribute that users select may give way to them.
    Entry("gpuModuleID", "int", "the GPU's number on its board, as in Fabric Manager",
          gpu=lambda device, _: device.gpu.module_id),
    Entry("chassisSerialNumber", "string", _IN_RACK,
          gpu=lambda device, _: device.gpu.chassis and device.gpu.chassis.serial),
    Entry("slotNumber", "int", f"{_IN_RACK}, among all slots of the chassis",
          gpu=lambda device, _: device.gpu.chassis and device.gpu.chassis.slot),
    Entry("trayIndex", "int", f"{_IN_RACK}, among the compute trays of the chassis",
          gpu=lambda device, _: device.gpu.chassis and device.gpu.chassis.tray),
)  # fmt: skip
"""The most important first: if a device has more than the API allows, the last ones give way. Entries without a
function are added to shared devices.
"""


def wire_device(device: OfferedDevice, inventory: Inventory, bound: BoundedRule | None = None) -> JsonObject:
    """Return one entry of `spec.devices`, which several claims may hold at the same time if it has a rule."""
    attributes, amounts = attributes_of(device, inventory), _amounts_of(device, inventory)
    if bound is None:
        capacity: JsonObject = {name: {"value": _quantity(name, amount)} for name, amount in amounts.items()}
    else:
        attributes = _sorted(attributes | {SHAREABLE: {"bool": True}})
        capacity = shared_capacity(amounts, device, bound)
    entry: JsonObject = {"name": device.name, "attributes": attributes}
    if capacity:
        entry["capacity"] = _sorted(capacity)
    return entry if bound is None else entry | {"allowMultipleAllocations": True}


def attributes_of(device: OfferedDevice, inventory: Inventory) -> JsonObject:
    """Return the attributes of a device by name, such as `{"type": {"string": "gpu"}}`."""
    found = {one.name: _wire(one.type, of(device, inventory)) for one, of in _BY_KIND[type(device)][0]}
    return _sorted({name: value for name, value in found.items() if value is not None})


def _amounts_of(device: OfferedDevice, inventory: Inventory) -> dict[str, int]:
    found = {one.name: of(device, inventory) for one, of in _BY_KIND[type(device)][1]}
    return {name: amount for name, amount in found.items() if amount is not None}


def _entries_by_kind(entries: tuple[Entry, ...]) -> Mapping[_Kind, tuple[_Found, _Found]]:
    of_kind = {kind: [(one, of) for one in entries if (of := one.of(kind)) is not None] for kind in _KINDS}
    return {
        kind: (
            tuple(item for item in found if not item[0].is_capacity),
            tuple(item for item in found if item[0].is_capacity),
        )
        for kind, found in of_kind.items()
    }


_BY_KIND = _entries_by_kind(ENTRIES)


def _sorted(entries: JsonObject) -> JsonObject:
    return {name: entries[name] for name in sorted(entries)}


_IN_BYTES = frozenset(one.name for one in ENTRIES if one.type == "bytes")


def _quantity(name: str, amount: int) -> str:
    return format_bytes(amount) if name in _IN_BYTES else str(amount)


def _wire(kind: str, value: Any) -> JsonObject | None:
    if kind == "version":
        value = semver(value)
        if value is None or len(value) > MAX_STRING_BYTES:
            return None
    elif kind == "string" and value:
        # Truncated to the API's limit, because a long product name must not invalidate the whole slice.
        value = value.encode()[:MAX_STRING_BYTES].decode(errors="ignore")
    return None if value is None or value == "" else {kind: value}


def semver(text: str | None) -> str | None:
    """Return a driver version as SemVer 2.0.0: `570.124.06` becomes `570.124.6`; None without a number.

    A fourth component becomes build metadata: `6.19.14.31400000` becomes `6.19.14+31400000`.
    """
    match = _LEADING_NUMBERS.match((text or "").strip())
    if match is None:
        return None
    numbers = [str(int(part)) for part in match[1].split(".")]
    version = ".".join([*numbers, "0", "0"][:3])
    return version if len(numbers) <= 3 else f"{version}+{'.'.join(numbers[3:])}"
