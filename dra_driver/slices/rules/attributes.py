"""Converts a device to the form of resource.k8s.io/v1: its attributes and capacities.

Names and types are those of NVIDIA's own driver, because users' CEL selectors and other schedulers depend on
them. Every attribute except `type` is best effort: unknown values are omitted, never 0 or "N/A".
"""

from __future__ import annotations

import re

from dra_driver.mig.rules.counters import has_counters
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
from dra_driver.sharing.rules.client_limits import BoundedRule
from dra_driver.sharing.rules.shared_device import MEMORY, MULTIPROCESSORS, SHAREABLE, shared_capacity

_LEADING_NUMBERS = re.compile(r"^v?(\d+(?:\.\d+)*)")

STANDARD_PREFIX = "resource.kubernetes.io/"
MAX_STRING_BYTES = 64
_MIB = 1 << 20
_IN_BYTES = frozenset({MEMORY, "addressableMemory"})


def wire_device(device: OfferedDevice, inventory: Inventory, bound: BoundedRule | None = None) -> JsonObject:
    """Return one entry of `spec.devices`: `{"name", "attributes", "capacity"}`.

    With a rule, several claims may hold the device at the same time.
    """
    attributes, amounts = attributes_of(device, inventory), amounts_of(device)
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
    match device:
        case WholeGpu():
            found = _whole_gpu_attributes(device.gpu, inventory) | _common_attributes(device.gpu, inventory)
        case StaticMigDevice() | DynamicMigDevice():
            found = _mig_attributes(device) | _common_attributes(device.gpu, inventory)
        case VfioDevice():
            found = _vfio_attributes(device)
    return _sorted({name: value for name, value in found.items() if value is not None})


def amounts_of(device: OfferedDevice) -> dict[str, int]:
    """Return the known capacities of a device, such as `{"memory": 85520809984}`; memory in bytes."""
    match device:
        case WholeGpu():
            return _whole_gpu_amounts(device.gpu)
        case StaticMigDevice():
            slices = {f"memorySlice{number}": 1 for number in device.mig.placement.memory_slices}
            return _profile_amounts(device.mig.profile) | slices
        case DynamicMigDevice():
            return _profile_amounts(device.profile)
        case VfioDevice():
            memory = device.card.addressable_memory
            return {} if memory is None else {"addressableMemory": memory}


def _sorted(entries: JsonObject) -> JsonObject:
    return {name: entries[name] for name in sorted(entries)}


def _quantity(name: str, amount: int) -> str:
    return format_bytes(amount) if name in _IN_BYTES else str(amount)


def _common_attributes(gpu: Gpu, inventory: Inventory) -> dict[str, JsonObject | None]:
    compute = gpu.cuda_compute_capability
    cuda = inventory.versions.cuda
    return {
        "productName": _string(gpu.product_name),
        "brand": _string(gpu.brand),
        "architecture": _string(gpu.architecture),
        "cudaComputeCapability": _version(None if compute is None else f"{compute[0]}.{compute[1]}"),
        "driverVersion": _version(inventory.versions.driver),
        "cudaDriverVersion": _version(None if cuda is None else f"{cuda[0]}.{cuda[1]}"),
        "addressingMode": _string(gpu.addressing_mode),
        "confidentialCompute": _string(inventory.confidential_compute),
        STANDARD_PREFIX + "pciBusID": _standard_bus_id(gpu.pci_bus_id),
        STANDARD_PREFIX + "pcieRoot": _string(gpu.pcie_root),
        STANDARD_PREFIX + "numaNode": _int(gpu.numa_node),
    }


def _whole_gpu_attributes(gpu: Gpu, inventory: Inventory) -> dict[str, JsonObject | None]:
    fabric = gpu.fabric
    return {
        "type": {"string": "gpu"},
        "uuid": _string(gpu.uuid),
        "index": _int(gpu.index),
        "minor": _minor(gpu),
        "migCapable": _bool(gpu.mig_capable),
        "nvlinkLinks": _int(gpu.nvlink_links),
        "nvlinkDomain": _string(inventory.nvlink_domains.get(gpu.uuid)),
        "fabricClusterUUID": _string(None if fabric is None else fabric.cluster_uuid),
        "fabricCliqueID": _int(None if fabric is None else fabric.clique_id),
        "imexChannels": _int(None if fabric is None else inventory.imex_channels),
    }


def _mig_attributes(device: StaticMigDevice | DynamicMigDevice) -> dict[str, JsonObject | None]:
    return {
        "type": {"string": "mig"},
        "uuid": _string(device.uuid),
        "parentUUID": _string(device.gpu.uuid),
        "parentIndex": _int(device.gpu.index),
        "parentMinor": _minor(device.gpu),
        "profile": _string(device.profile.name),
    }


def _vfio_attributes(device: VfioDevice) -> dict[str, JsonObject | None]:
    """Use the host's data about the card, which does not depend on its driver."""
    card = device.card
    return {
        "type": {"string": "vfio"},
        "uuid": _string(device.uuid),
        "vendorID": {"string": "0x10de"},
        "deviceID": {"string": f"0x{card.device_id:04x}"},
        "productName": _string(card.product_name or device.gpu.product_name),
        "iommuGroup": _int(card.iommu_group),
        "iommuFDEnabled": _bool(card.has_iommufd),
        STANDARD_PREFIX + "pciBusID": _standard_bus_id(card.bus_id),
        STANDARD_PREFIX + "pcieRoot": _string(card.pcie_root),
        STANDARD_PREFIX + "numaNode": _int(card.numa_node),
    }


def _minor(gpu: Gpu) -> JsonObject | None:
    """Return None with MIG on demand: MIG mode changes the minor number, and claims change the mode."""
    return _int(gpu.minor) if gpu.partitioning is None else None


def _whole_gpu_amounts(gpu: Gpu) -> dict[str, int]:
    memory = {} if gpu.memory_bytes is None else {MEMORY: gpu.memory_bytes}
    if gpu.partitioning is None or not has_counters(gpu):
        return memory
    profiles = [_engines(row.profile) for row in gpu.partitioning.profiles]
    most = {name: max(engines[name] for engines in profiles) for name in profiles[0]}
    if gpu.multiprocessors is not None:
        most[MULTIPROCESSORS] = gpu.multiprocessors
    return most | memory


def _profile_amounts(profile: MigProfile) -> dict[str, int]:
    return _engines(profile) | {MEMORY: profile.memory_mib * _MIB}


def _engines(profile: MigProfile) -> dict[str, int]:
    return {
        MULTIPROCESSORS: profile.multiprocessors,
        "copyEngines": profile.copy_engines,
        "decoders": profile.decoders,
        "encoders": profile.encoders,
        "jpegEngines": profile.jpeg_engines,
        "ofaEngines": profile.ofa_engines,
    }


def _string(value: str | None) -> JsonObject | None:
    """Return a string value, truncated to the API's limit, because a long product name must not invalidate
    the whole slice.
    """
    if not value:
        return None
    raw = value.encode()
    return {"string": raw[:MAX_STRING_BYTES].decode(errors="ignore")}


def _int(value: int | None) -> JsonObject | None:
    return None if value is None else {"int": value}


def _bool(value: bool | None) -> JsonObject | None:
    return None if value is None else {"bool": value}


def _version(text: str | None) -> JsonObject | None:
    version = semver(text)
    return None if version is None or len(version) > MAX_STRING_BYTES else {"version": version}


def _standard_bus_id(bus_id: str | None) -> JsonObject | None:
    """Return the standard attribute has four domain digits; larger domains have no standard form."""
    return {"string": bus_id} if bus_id is not None and len(bus_id) == len("0000:00:00.0") else None


def semver(text: str | None) -> str | None:
    """Return a driver version as SemVer 2.0.0: `570.124.06` becomes `570.124.6`; None without a number.

    A fourth component becomes build metadata, which comparisons ignore: `6.19.14.31400000` becomes
    `6.19.14+31400000`. Missing components are zero.
    """
    match = _LEADING_NUMBERS.match((text or "").strip())
    if match is None:
        return None
    numbers = [str(int(part)) for part in match[1].split(".")]
    version = ".".join([*numbers, "0", "0"][:3])
    return version if len(numbers) <= 3 else f"{version}+{'.'.join(numbers[3:])}"
