"""Validation of one device of a ResourceSlice. Source: validation of resource.k8s.io/v1."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from dra_driver.model.ids import is_dns_label
from playground.apiserver.faultlist import FaultList
from playground.apiserver.names import is_attribute_name, is_label_key, is_label_value
from playground.apiserver.quantity import parse_quantity

_MOST_NAMES = 32  # attributes and capacities together
_MOST_BYTES = 64
_MOST_CONSUMED_SETS = 2
_MOST_COUNTERS = 32
_MOST_TAINTS = 16
_MOST_TAINTS_BEFORE = 4
_MANY_TAINTS = 35  # also those without an effect
_MOST_VALID_VALUES = 10
_SCALARS = {"int": int, "bool": bool, "string": str, "version": str}
_NUMBER = r"(?:0|[1-9]\d*)"
_PRE = rf"(?:{_NUMBER}|\d*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-{_PRE}(?:\.{_PRE})*)?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?"
)


def check_device(device: dict[str, Any], path: str, faults: FaultList, minor: int) -> None:
    """Add every fault of one device for Kubernetes 1.`minor`."""
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    faults.too_many(path, len(attributes) + len(capacity), _MOST_NAMES)
    for name, attribute in attributes.items():
        _check_attribute(name, attribute, f"{path}.attributes[{name}]", faults)
    shared = bool(device.get("allowMultipleAllocations"))
    for name, entry in capacity.items():
        _check_capacity(name, entry, f"{path}.capacity[{name}]", faults, shared)
    consumed = device.get("consumesCounters") or []
    faults.too_many(f"{path}.consumesCounters", len(consumed), _MOST_CONSUMED_SETS)
    check_counters(consumed, f"{path}.consumesCounters", "counterSet", faults)
    _check_taints(device.get("taints") or [], f"{path}.taints", faults, minor)


def check_counters(sets: list[dict[str, Any]], path: str, named_by: str, faults: FaultList) -> None:
    """Add every fault of counter sets, or of what a device consumes of them."""
    check_names([entry.get(named_by) for entry in sets], path, named_by, faults)
    for index, entry in enumerate(sets):
        here, counters = f"{path}[{index}].counters", entry.get("counters") or {}
        if not counters:
            faults.required(here)
        faults.too_many(here, len(counters), _MOST_COUNTERS)
        for key, counter in counters.items():
            if not is_dns_label(key):
                faults.invalid(f"{here}[{key}]", key, "must be a DNS label of at most 63")
            if parse_quantity(counter.get("value")) is None:
                faults.invalid(f"{here}[{key}].value", counter.get("value"), "must be a quantity")


def check_names(names: list[Any], path: str, field: str, faults: FaultList) -> None:
    """Add a fault for every name that is no DNS label, and for one that occurs twice."""
    for index, name in enumerate(names):
        here = f"{path}[{index}].{field}"
        if not isinstance(name, str) or not is_dns_label(name):
            faults.invalid(here, name, "must be a DNS label of at most 63")
        elif name in names[:index]:
            faults.duplicate(here, name)


def _check_attribute(name: str, attribute: dict[str, Any], path: str, faults: FaultList) -> None:
    if not is_attribute_name(name):
        faults.invalid(path, name, "must be [domain/]identifier")
    kinds = [kind for kind in _SCALARS if attribute.get(kind) is not None]
    if len(kinds) != 1:
        faults.invalid(path, kinds, "exactly one value must be specified")
        return
    _check_value(kinds[0], attribute[kinds[0]], f"{path}.{kinds[0]}", faults)


def _check_value(kind: str, value: Any, path: str, faults: FaultList) -> None:
    if not isinstance(value, _SCALARS[kind]) or (kind == "int" and isinstance(value, bool)):
        faults.invalid(path, value, f"must be of type {kind}")
    elif isinstance(value, str):
        faults.too_long(path, len(value.encode()), _MOST_BYTES)
        if kind == "version" and not _SEMVER.fullmatch(value):
            faults.invalid(path, value, "must be a string compatible with semver.org spec 2.0.0")


def _check_capacity(name: str, entry: dict[str, Any], path: str, faults: FaultList, shared: bool) -> None:
    if not is_attribute_name(name):
        faults.invalid(path, name, "must be [domain/]identifier")
    value = parse_quantity(entry.get("value"))
    if value is None:
        faults.invalid(f"{path}.value", entry.get("value"), "must be a quantity")
        return
    policy = entry.get("requestPolicy")
    if policy and not shared:
        faults.invalid(f"{path}.requestPolicy", "", "only allowed with allowMultipleAllocations")
    elif policy:
        _check_policy(policy, value, f"{path}.requestPolicy", faults)


def _check_policy(policy: dict[str, Any], most: Fraction, path: str, faults: FaultList) -> None:
    values, span = policy.get("validValues"), policy.get("validRange")
    if values and span:
        faults.invalid(path, "validValues, validRange", "only one may be set")
    default = parse_quantity(policy.get("default")) if policy.get("default") is not None else None
    if (values or span) and default is None:
        faults.required(f"{path}.default")
        return
    if values:
        numbers = [parse_quantity(value) for value in values]
        faults.too_many(f"{path}.validValues", len(values), _MOST_VALID_VALUES)
        known = [number for number in numbers if number is not None]
        if len(known) != len(numbers) or known != sorted(set(known)) or known[-1] > most:
            faults.invalid(f"{path}.validValues", values, "must be ascending, unique and within the capacity")
        if default not in known:
            faults.invalid(f"{path}.default", policy["default"], "must be one of validValues")
    if span and default is not None:
        _check_range(span, default, most, f"{path}.validRange", faults)


def _check_range(
    span: dict[str, Any], default: Fraction, most: Fraction, path: str, faults: FaultList
) -> None:
    low = parse_quantity(span.get("min"))
    if low is None:
        faults.required(f"{path}.min")
        return
    high = parse_quantity(span["max"]) if span.get("max") is not None else None
    step = parse_quantity(span["step"]) if span.get("step") is not None else None
    top = most if high is None else high
    if not 0 <= low <= top <= most:
        faults.invalid(path, span, "must be 0 <= min <= max <= capacity")
    if not low <= default <= top:
        faults.invalid(f"{path}", span, "default must lie in the range")
    if step is not None and step > 0:
        off = (default - low) % step or (high is not None and (high - low) % step) or low + step > most
        if off:
            faults.invalid(f"{path}.step", span["step"], "min, max and default must be steps apart")


def _check_taints(taints: list[dict[str, Any]], path: str, faults: FaultList, minor: int) -> None:
    faults.too_many(path, len(taints), _MOST_TAINTS if minor >= _MANY_TAINTS else _MOST_TAINTS_BEFORE)
    effects = ("None", "NoSchedule", "NoExecute") if minor >= _MANY_TAINTS else ("NoSchedule", "NoExecute")
    for index, taint in enumerate(taints):
        if not is_label_key(taint.get("key")):
            faults.invalid(f"{path}[{index}].key", taint.get("key"), "must be a label name")
        if not is_label_value(taint.get("value") or ""):
            faults.invalid(f"{path}[{index}].value", taint.get("value"), "must be a label value")
        if taint.get("effect") not in effects:
            faults.invalid(f"{path}[{index}].effect", taint.get("effect"), f"must be one of {effects}")
