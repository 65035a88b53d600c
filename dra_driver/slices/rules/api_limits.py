"""Limits of ResourceSlices that the API server enforces, checked before anything is sent.

Source: validation of resource.k8s.io/v1 as of Kubernetes 1.36. Lengths of values are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.model.ids import is_dns_label
from dra_driver.model.units import parse_quantity

JsonObject = dict[str, Any]

MAX_DEVICES_PER_SLICE = 64
"""The API takes 128 of plain devices but only 64 where one has a taint, which may come at any time."""
MAX_COUNTER_SETS_PER_SLICE = 8
MAX_COUNTERS_PER_SET = 32
MAX_COUNTER_SETS_PER_DEVICE = 2
MAX_ATTRIBUTES_AND_CAPACITIES = 32
MAX_VALUE_BYTES = 64
MAX_TAINTS = 16
MAX_VALID_VALUES = 10

_IDENTIFIER = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,31}\Z")
_DNS_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_SEMVER = re.compile(
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?\Z"
)
_VALUE_KINDS = ("int", "bool", "string", "version")

_amount = lru_cache(maxsize=1024)(parse_quantity)
"""A node's pool has thousands of quantities, but few different ones."""


def device_faults(device: JsonObject) -> list[str]:
    """Why the API server would refuse this device; empty if it would not."""
    name = device["name"]
    faults = [] if is_dns_label(name) else [f"device {name!r}: the name is not a DNS label"]
    attributes: JsonObject = device.get("attributes", {})
    capacity: JsonObject = device.get("capacity", {})
    if len(attributes) + len(capacity) > MAX_ATTRIBUTES_AND_CAPACITIES:
        count = len(attributes) + len(capacity)
        faults.append(
            f"device {name}: {count} attributes and capacities, at most {MAX_ATTRIBUTES_AND_CAPACITIES} are allowed"
        )
    for key in (*attributes, *capacity):
        if not _is_qualified(key):
            faults.append(f"device {name}: {key!r} is not an attribute or capacity name")
    for key, value in attributes.items():
        faults += [f"device {name}: attribute {key}: {fault}" for fault in _value_faults(value)]
    shared = device.get("allowMultipleAllocations", False)
    for key, entry in capacity.items():
        faults += [f"device {name}: capacity {key}: {fault}" for fault in _capacity_faults(entry, shared)]
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
        yield f"{text!r} is not a semantic version"


def _capacity_faults(entry: JsonObject, shared: bool) -> Iterator[str]:
    try:
        value = _amount(entry["value"])
        policy: JsonObject | None = entry.get("requestPolicy")
        if policy is None:
            return
        if not shared:
            yield "requestPolicy needs allowMultipleAllocations"
        values, span = policy.get("validValues"), policy.get("validRange")
        default = _amount(policy["default"]) if "default" in policy else None
        if values and span:
            yield "validValues and validRange exclude each other"
        if (values or span) and default is None:
            yield "requestPolicy needs a default"
        if values:
            yield from _valid_values_faults([_amount(text) for text in values], default, value)
        if span:
            bounds = {key: _amount(text) for key, text in span.items()}
            yield from _valid_range_faults(bounds, default, value)
    except InvalidConfigError as error:
        yield str(error)


def _valid_values_faults(
    values: Sequence[Fraction], default: Fraction | None, capacity: Fraction
) -> Iterator[str]:
    if len(values) > MAX_VALID_VALUES:
        yield f"more than {MAX_VALID_VALUES} valid values"
    if list(values) != sorted(set(values)):
        yield "valid values are not ascending"
    if max(values) > capacity:
        yield "a valid value is above the capacity"
    if default is not None and default not in values:
        yield "the default is not a valid value"


def _valid_range_faults(
    bounds: Mapping[str, Fraction], default: Fraction | None, capacity: Fraction
) -> Iterator[str]:
    low, high, step = bounds.get("min"), bounds.get("max"), bounds.get("step")
    if low is None:
        yield "the valid range has no min"
        return
    top = capacity if high is None else high
    if not 0 <= low <= top <= capacity:
        yield "the valid range must have 0 <= min <= max <= capacity"
    if default is not None and not low <= default <= top:
        yield "the default lies outside the valid range"
    if step is None:
        return
    if step <= 0:
        yield "the step must be above 0"
        return
    if low + step > capacity:
        yield "min and one step are above the capacity"
    if (high is not None and (high - low) % step) or (default is not None and (default - low) % step):
        yield "max and default must be whole steps above min"


def counter_set_faults(entry: JsonObject) -> list[str]:
    """Why the API server would refuse this counter set; empty if it would not."""
    name = entry["name"]
    faults = [] if is_dns_label(name) else [f"counter set {name!r}: the name is not a DNS label"]
    counters: JsonObject = entry["counters"]
    if not 0 < len(counters) <= MAX_COUNTERS_PER_SET:
        faults.append(
            f"counter set {name}: {len(counters)} counters, 1 to {MAX_COUNTERS_PER_SET} are allowed"
        )
    for key, counter in counters.items():
        faults += [f"counter set {name}: counter {key}: {fault}" for fault in _counter_faults(key, counter)]
    return faults


def consumption_faults(device: JsonObject, counter_sets: Iterable[JsonObject]) -> list[str]:
    """Why the API server would refuse what the device takes of the pool's counters, or why it could never be
    allocated; empty if neither is so. The counter sets are without faults."""
    name = device["name"]
    known: JsonObject = {entry["name"]: entry["counters"] for entry in counter_sets}
    used = [use["counterSet"] for use in device.get("consumesCounters", [])]
    faults = [
        f"device {name}: consumes from counter set {entry} twice"
        for entry in sorted({entry for entry in used if used.count(entry) > 1})
    ]
    for use in device.get("consumesCounters", []):
        source, counters = use["counterSet"], use["counters"]
        missing = sorted(set(counters) - set(known.get(source, ())))
        if source not in known or missing:
            faults.append(f"device {name}: consumes unknown counters of {source}: {missing}")
            continue
        if not 0 < len(counters) <= MAX_COUNTERS_PER_SET:
            faults.append(
                f"device {name}: {len(counters)} counters of {source}, 1 to {MAX_COUNTERS_PER_SET} are allowed"
            )
        for key, counter in counters.items():
            problems = list(_counter_faults(key, counter))
            if not problems and _amount(counter["value"]) > _amount(known[source][key]["value"]):
                problems.append(
                    f"{counter['value']} is more than the {known[source][key]['value']} that exist"
                )
            faults += [f"device {name}: counter {key} of {source}: {fault}" for fault in problems]
    return faults


def _counter_faults(name: str, counter: JsonObject) -> Iterator[str]:
    if not is_dns_label(name):
        yield "the name is not a DNS label"
    try:
        if _amount(counter["value"]) < 0:
            yield f"{counter['value']} is below 0"
    except InvalidConfigError as error:
        yield str(error)
