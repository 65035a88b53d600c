"""Validation of ResourceSlices, to the limits of Kubernetes 1.34 to 1.36. Source: its API validation."""

from __future__ import annotations

from typing import Any

from playground.apiserver.devicerules import check_device
from playground.apiserver.failure import Cause
from playground.apiserver.faultlist import FaultList
from playground.apiserver.names import is_label, is_pool_name, is_subdomain
from playground.apiserver.quantity import parse_quantity

_MOST_DEVICES = 128
_MOST_RICH_DEVICES = 64  # if any has taints, counters or list attributes
_MOST_COUNTER_SETS = 8
_MOST_COUNTERS = 32
_APART = 35  # before, counters and the devices that use them are in one slice
_NODE_CHOICES = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")


def slice_faults(obj: dict[str, Any], before: dict[str, Any] | None, minor: int = 36) -> list[Cause]:
    """Every fault of a stored-form slice for Kubernetes 1.`minor`; `before` is the object it replaces."""
    faults = FaultList()
    spec = obj.get("spec") or {}
    if not is_subdomain(spec.get("driver"), 63):
        faults.invalid("spec.driver", spec.get("driver"), "must be a lower-case DNS subdomain of at most 63")
    _check_pool(spec.get("pool") or {}, faults)
    _check_node_choice(spec, faults)
    _check_devices(spec, faults, minor)
    _check_counter_sets(spec.get("sharedCounters") or [], faults)
    if minor < _APART:
        _check_together(spec, faults)
    elif spec.get("sharedCounters") and spec.get("devices"):
        faults.invalid(
            "spec", "sharedCounters", "sharedCounters and devices are mutually exclusive in a slice"
        )
    if before is not None:
        _check_immutable(spec, before.get("spec") or {}, faults)
    return faults.causes


def _check_pool(pool: dict[str, Any], faults: FaultList) -> None:
    if not is_pool_name(pool.get("name")):
        faults.invalid("spec.pool.name", pool.get("name"), "must be DNS subdomains joined by /, at most 253")
    if not _is_int(pool.get("resourceSliceCount")) or pool["resourceSliceCount"] < 1:
        count = pool.get("resourceSliceCount")
        faults.invalid("spec.pool.resourceSliceCount", count, "must be greater than zero")
    if not _is_int(pool.get("generation", 0)) or pool.get("generation", 0) < 0:
        faults.invalid(
            "spec.pool.generation", pool.get("generation"), "must be greater than or equal to zero"
        )


def _check_node_choice(spec: dict[str, Any], faults: FaultList) -> None:
    chosen = [field for field in _NODE_CHOICES if spec.get(field)]
    if not chosen:
        faults.required("spec", f"exactly one of {', '.join(_NODE_CHOICES)} is required")
    elif len(chosen) > 1:
        faults.invalid("spec", ", ".join(chosen), f"exactly one of {', '.join(_NODE_CHOICES)} is required")
    for field in ("allNodes", "perDeviceNodeSelection"):
        if spec.get(field) is False:
            faults.invalid(f"spec.{field}", "false", "must be either unset or set to true")
    if spec.get("nodeName") and not is_subdomain(spec["nodeName"]):
        faults.invalid("spec.nodeName", spec["nodeName"], "must be a DNS subdomain")
    terms = (spec.get("nodeSelector") or {}).get("nodeSelectorTerms")
    if spec.get("nodeSelector") and len(terms or ()) != 1:
        faults.invalid("spec.nodeSelector.nodeSelectorTerms", len(terms or ()), "must have exactly one term")


def _check_together(spec: dict[str, Any], faults: FaultList) -> None:
    known = {entry.get("name") for entry in spec.get("sharedCounters") or ()}
    for index, device in enumerate(spec.get("devices") or ()):
        for use in device.get("consumesCounters") or ():
            if use.get("counterSet") not in known:
                path = f"spec.devices[{index}].consumesCounters"
                faults.invalid(
                    path, use.get("counterSet"), "must reference a counterSet defined in the slice"
                )


def _check_devices(spec: dict[str, Any], faults: FaultList, minor: int) -> None:
    devices = spec.get("devices") or []
    most = _MOST_RICH_DEVICES if any(_is_rich(device) for device in devices) else _MOST_DEVICES
    faults.too_many("spec.devices", len(devices), most)
    seen: set[str] = set()
    for index, device in enumerate(devices):
        path = f"spec.devices[{index}]"
        name = device.get("name")
        if not is_label(name):
            faults.invalid(f"{path}.name", name, "must be a DNS label of at most 63")
        elif name in seen:
            faults.duplicate(f"{path}.name", name)
        seen.add(str(name))
        check_device(device, path, faults, minor, own_node=bool(spec.get("perDeviceNodeSelection")))


def _is_rich(device: dict[str, Any]) -> bool:
    attributes = (device.get("attributes") or {}).values()
    lists = any({"ints", "bools", "strings", "versions"} & set(value) for value in attributes)
    return bool(device.get("taints") or device.get("consumesCounters") or lists)


def _check_counter_sets(sets: list[dict[str, Any]], faults: FaultList) -> None:
    faults.too_many("spec.sharedCounters", len(sets), _MOST_COUNTER_SETS)
    seen: set[str] = set()
    for index, counter_set in enumerate(sets):
        path, name = f"spec.sharedCounters[{index}]", counter_set.get("name")
        if not is_label(name):
            faults.invalid(f"{path}.name", name, "must be a DNS label of at most 63")
        elif name in seen:
            faults.duplicate(f"{path}.name", name)
        seen.add(str(name))
        counters = counter_set.get("counters") or {}
        if not counters:
            faults.required(f"{path}.counters")
        faults.too_many(f"{path}.counters", len(counters), _MOST_COUNTERS)
        for key, counter in counters.items():
            if not is_label(key):
                faults.invalid(f"{path}.counters[{key}]", key, "must be a DNS label of at most 63")
            if parse_quantity(counter.get("value")) is None:
                faults.invalid(f"{path}.counters[{key}].value", counter.get("value"), "must be a quantity")


def _check_immutable(spec: dict[str, Any], before: dict[str, Any], faults: FaultList) -> None:
    pairs = [(f"spec.{name}", spec.get(name), before.get(name)) for name in ("driver", "nodeName")]
    names = [(part.get("pool") or {}).get("name") for part in (spec, before)]
    for field, new, old in [*pairs, ("spec.pool.name", names[0], names[1])]:
        if new != old:
            faults.invalid(field, new, "field is immutable")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
