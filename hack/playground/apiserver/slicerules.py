"""Validation of ResourceSlices, to the limits of Kubernetes 1.34 to 1.36. Source: its API validation."""

from __future__ import annotations

from typing import Any

from playground.apiserver.devicerules import check_counters, check_device, check_names
from playground.apiserver.failure import Cause
from playground.apiserver.faultlist import FaultList
from playground.apiserver.names import is_pool_name, is_subdomain

_MOST_DEVICES = 128
_MOST_RICH_DEVICES = 64  # if any has taints or counters
_MOST_COUNTER_SETS = 8
_APART = 35  # before, counters and the devices that use them are in one slice
_NODE_CHOICES = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")


def slice_faults(obj: dict[str, Any], before: dict[str, Any] | None, minor: int = 36) -> list[Cause]:
    """Every fault of a stored-form slice for Kubernetes 1.`minor`; `before` is the object it replaces."""
    faults = FaultList()
    spec = obj.get("spec") or {}
    if not is_subdomain(spec.get("driver"), 63):
        faults.invalid("spec.driver", spec.get("driver"), "must be a lower-case DNS subdomain of at most 63")
    _check_pool(spec.get("pool") or {}, faults)
    if sum(bool(spec.get(field)) for field in _NODE_CHOICES) != 1:
        faults.required("spec", f"exactly one of {', '.join(_NODE_CHOICES)} is required")
    _check_devices(spec, faults, minor)
    counter_sets = spec.get("sharedCounters") or []
    faults.too_many("spec.sharedCounters", len(counter_sets), _MOST_COUNTER_SETS)
    check_counters(counter_sets, "spec.sharedCounters", "name", faults)
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
    check_names([device.get("name") for device in devices], "spec.devices", "name", faults)
    for index, device in enumerate(devices):
        check_device(device, f"spec.devices[{index}]", faults, minor)


def _is_rich(device: dict[str, Any]) -> bool:
    return bool(device.get("taints") or device.get("consumesCounters"))


def _check_immutable(spec: dict[str, Any], before: dict[str, Any], faults: FaultList) -> None:
    pairs = [(f"spec.{name}", spec.get(name), before.get(name)) for name in ("driver", "nodeName")]
    names = [(part.get("pool") or {}).get("name") for part in (spec, before)]
    for field, new, old in [*pairs, ("spec.pool.name", names[0], names[1])]:
        if new != old:
            faults.invalid(field, new, "field is immutable")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
