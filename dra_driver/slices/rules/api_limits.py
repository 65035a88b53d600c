"""Limits of ResourceSlices that the API server enforces, and those of them that the hardware may break.

How values, versions, quantities and request policies look is ours alone: tests put every machine and every sharing rule
before the validation of resource.k8s.io/v1. How many there are, and which names NVML gives, depends on the hardware: a
device that breaks such a limit must not cost the node its other devices.

Source: validation of resource.k8s.io/v1 as of Kubernetes 1.37.
"""

from __future__ import annotations

from collections.abc import Iterable

from dra_driver.model.ids import is_dns_label
from dra_driver.model.json_object import JsonObject

MAX_DEVICES_PER_SLICE = 64
"""The API takes 128 of plain devices but only 64 where one has a taint, which may come at any time."""
MAX_COUNTER_SETS_PER_SLICE = 8
MAX_COUNTERS_PER_SET = 32
MAX_ATTRIBUTES_AND_CAPACITIES = 32
MAX_TAINTS = 16


def device_faults(device: JsonObject) -> list[str]:
    """Which limits this device breaks."""
    name = device["name"]
    faults = [] if is_dns_label(name) else [f"device {name!r}: the name is not a DNS label"]
    count = len(device.get("attributes", {})) + len(device.get("capacity", {}))
    if count > MAX_ATTRIBUTES_AND_CAPACITIES:
        faults.append(
            f"device {name}: {count} attributes and capacities, at most {MAX_ATTRIBUTES_AND_CAPACITIES} are allowed"
        )
    return faults


def counter_set_faults(entry: JsonObject) -> list[str]:
    """Which limits this counter set breaks."""
    count = len(entry["counters"])
    if 0 < count <= MAX_COUNTERS_PER_SET:
        return []
    return [f"counter set {entry['name']}: {count} counters, 1 to {MAX_COUNTERS_PER_SET} are allowed"]


def has_its_counters(device: JsonObject, counter_sets: Iterable[JsonObject]) -> bool:
    """Whether the pool has all counters from which the device consumes; the API server refuses it otherwise."""
    known: JsonObject = {entry["name"]: entry["counters"] for entry in counter_sets}
    return all(
        use["counters"].keys() <= known.get(use["counterSet"], {}).keys()
        for use in device.get("consumesCounters", ())
    )
