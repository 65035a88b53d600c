"""A device in the wire shape of resource.k8s.io/v1: its attributes and capacities.

Names and types are those of NVIDIA's own driver, because users' CEL selectors and other schedulers stand on them.
Every attribute but `type` and `uuid` is best effort: what is unknown is left out, never 0 or "N/A".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra_driver.core.versions import semver
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory, MigPartition, OfferedDevice, WholeGpu
from dra_driver.model.units import format_bytes

JsonObject = dict[str, Any]

STANDARD_PREFIX = "resource.kubernetes.io/"
MAX_STRING_BYTES = 64
_MIB = 1 << 20


def wire_device(device: OfferedDevice, inventory: Inventory) -> JsonObject:
    """One entry of `spec.devices`: `{"name", "attributes", "capacity"}`."""
    match device:
        case WholeGpu(name, gpu):
            specific = _whole_gpu_attributes(gpu, inventory)
            capacity = _whole_gpu_capacity(gpu)
        case MigPartition(name, gpu, _):
            specific = _mig_attributes(device)
            capacity = _mig_capacity(device)
    attributes = {**specific, **_common_attributes(gpu, inventory)}
    entry: JsonObject = {
        "name": name,
        "attributes": {key: attributes[key] for key in sorted(attributes) if attributes[key] is not None},
    }
    if capacity:
        entry["capacity"] = {key: {"value": capacity[key]} for key in sorted(capacity)}
    return entry


def _common_attributes(gpu: Gpu, inventory: Inventory) -> Mapping[str, JsonObject | None]:
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
        STANDARD_PREFIX + "pciBusID": _standard_bus_id(gpu.pci_bus_id),
        STANDARD_PREFIX + "pcieRoot": _string(gpu.pcie_root),
        STANDARD_PREFIX + "numaNode": _int(gpu.numa_node),
    }


def _whole_gpu_attributes(gpu: Gpu, inventory: Inventory) -> Mapping[str, JsonObject | None]:
    fabric = gpu.fabric
    return {
        "type": {"string": "gpu"},
        "uuid": _string(gpu.uuid),
        "index": _int(gpu.index),
        "minor": _int(gpu.minor),
        "migCapable": _bool(gpu.mig_capable),
        "nvlinkLinks": _int(gpu.nvlink_links),
        "nvlinkDomain": _string(inventory.nvlink_domains.get(gpu.uuid)),
        "fabricClusterUUID": _string(None if fabric is None else fabric.cluster_uuid),
        "fabricCliqueID": _int(None if fabric is None else fabric.clique_id),
    }


def _mig_attributes(device: MigPartition) -> Mapping[str, JsonObject | None]:
    return {
        "type": {"string": "mig"},
        "uuid": _string(device.mig.uuid),
        "parentUUID": _string(device.gpu.uuid),
        "parentIndex": _int(device.gpu.index),
        "parentMinor": _int(device.gpu.minor),
        "profile": _string(device.mig.profile.name),
    }


def _whole_gpu_capacity(gpu: Gpu) -> Mapping[str, str]:
    return {} if gpu.memory_bytes is None else {"memory": format_bytes(gpu.memory_bytes)}


def _mig_capacity(device: MigPartition) -> Mapping[str, str]:
    profile = device.mig.profile
    capacity = {
        "multiprocessors": str(profile.multiprocessors),
        "copyEngines": str(profile.copy_engines),
        "decoders": str(profile.decoders),
        "encoders": str(profile.encoders),
        "jpegEngines": str(profile.jpeg_engines),
        "ofaEngines": str(profile.ofa_engines),
        "memory": format_bytes(profile.memory_mib * _MIB),
    }
    return capacity | {f"memorySlice{number}": "1" for number in device.mig.placement.memory_slices}


def _string(value: str | None) -> JsonObject | None:
    """A string value cut to what the API takes; one long product name must not cost the whole slice."""
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
    """The standard attribute allows four domain digits; larger domains have no standard form."""
    return {"string": bus_id} if bus_id is not None and len(bus_id) == len("0000:00:00.0") else None
