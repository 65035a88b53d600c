"""Limits of ResourceSlices that the API server enforces, checked before anything is sent.

Source: validation of resource.k8s.io/v1 as of Kubernetes 1.36. Lengths of values are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from dra_driver.model.ids import is_dns_label

JsonObject = dict[str, Any]

MAX_DEVICES_PER_SLICE = 64
"""The API takes 128 of plain devices but only 64 where one has a taint, which may come at any time."""
MAX_COUNTER_SETS_PER_SLICE = 8
MAX_COUNTERS_PER_SET = 32
MAX_COUNTER_SETS_PER_DEVICE = 2
MAX_ATTRIBUTES_AND_CAPACITIES = 32
MAX_VALUE_BYTES = 64
MAX_TAINTS = 16

_IDENTIFIER = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,31}\Z")
_DNS_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_SEMVER = re.compile(
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?\Z"
)
_VALUE_KINDS = ("int", "bool", "string", "version")


def device_faults(device: JsonObject) -> list[str]:
    """Why the API server would refuse this device; empty if it would not."""
    name = device["name"]
    faults = [] if is_dns_label(name) else [f"device {name!r}: the name is no DNS label"]
    attributes: JsonObject = device.get("attributes", {})
    capacity: JsonObject = device.get("capacity", {})
    if len(attributes) + len(capacity) > MAX_ATTRIBUTES_AND_CAPACITIES:
        count = len(attributes) + len(capacity)
        faults.append(
            f"device {name}: {count} attributes and capacities, at most {MAX_ATTRIBUTES_AND_CAPACITIES} are allowed"
        )
    for key in (*attributes, *capacity):
        if not _is_qualified(key):
            faults.append(f"device {name}: {key!r} is no attribute or capacity name")
    for key, value in attributes.items():
        faults += [f"device {name}: attribute {key}: {fault}" for fault in _value_faults(value)]
    if len(device.get("taints", [])) > MAX_TAINTS:
        faults.append(f"device {name}: more than {MAX_TAINTS} taints")
    consumed = device.get("consumesCounters", [])
    if len(consumed) > MAX_COUNTER_SETS_PER_DEVICE:
        faults.append(f"device {name}: consumes from more than {MAX_COUNTER_SETS_PER_DEVICE} counter sets")
    return faults


def _is_qualified(name: str) -> bool:
    domain, slash, identifier = name.rpartition("/")
    if slash and (len(domain) > 63 or not _DNS_SUBDOMAIN.fullmatch(domain)):
        return False
    return _IDENTIFIER.fullmatch(identifier) is not None


def _value_faults(value: JsonObject) -> Iterator[str]:
    kinds = [kind for kind in _VALUE_KINDS if kind in value]
    if len(kinds) != 1 or len(value) != 1:
        yield f"must have exactly one of {', '.join(_VALUE_KINDS)}"
        return
    text = value[kinds[0]]
    if isinstance(text, str) and len(text.encode()) > MAX_VALUE_BYTES:
        yield f"longer than {MAX_VALUE_BYTES} bytes"
    if kinds[0] == "version" and not _SEMVER.fullmatch(text):
        yield f"{text!r} is no semantic version"


def pool_faults(devices: Sequence[JsonObject], counter_sets: Sequence[JsonObject]) -> list[str]:
    """Why the API server or the scheduler would refuse the pool as a whole; empty if they would not."""
    faults = [fault for device in devices for fault in device_faults(device)]
    faults += _duplicates("device", [device["name"] for device in devices])
    faults += _duplicates("counter set", [entry["name"] for entry in counter_sets])
    known = {entry["name"]: set(entry["counters"]) for entry in counter_sets}
    for entry in counter_sets:
        if len(entry["counters"]) > MAX_COUNTERS_PER_SET:
            faults.append(f"counter set {entry['name']}: more than {MAX_COUNTERS_PER_SET} counters")
    for device in devices:
        for use in device.get("consumesCounters", []):
            missing = set(use["counters"]) - known.get(use["counterSet"], set())
            if use["counterSet"] not in known or missing:
                faults.append(
                    f"device {device['name']}: consumes unknown counters of {use['counterSet']}: {sorted(missing)}"
                )
    return faults


def _duplicates(kind: str, names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    doubled = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    return [f"{kind} name {name} occurs more than once in the pool" for name in sorted(doubled)]
