"""Feature gates: which are on by default, and what the API server silently drops while one is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_GATES: Mapping[str, bool] = {
    "DRADeviceTaints": True,
    "DRAPartitionableDevices": True,
    "DRAConsumableCapacity": True,
    "DRAResourceClaimDeviceStatus": True,
    "DRADeviceCompatibilityGroups": False,
}
_ALPHA_UNTIL_35 = ("DRADeviceTaints", "DRAPartitionableDevices", "DRAConsumableCapacity")


def default_gates(minor: int) -> dict[str, bool]:
    """The gates of Kubernetes 1.`minor`, as they are if nobody sets them; from 1.34 on."""
    old = dict.fromkeys(_ALPHA_UNTIL_35, False) if minor < 36 else {}
    return {**DEFAULT_GATES, **old}


_SLICE_FIELDS: Mapping[str, tuple[str, ...]] = {"DRAPartitionableDevices": ("sharedCounters",)}
_DEVICE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "DRADeviceTaints": ("taints",),
    "DRAPartitionableDevices": ("consumesCounters",),
    "DRAConsumableCapacity": ("allowMultipleAllocations",),
}


def drop_disabled(obj: dict[str, Any], gates: Mapping[str, bool], before: dict[str, Any] | None) -> None:
    """Remove the fields of disabled gates from a stored-form object, in place. `before` is what it replaces."""
    off = {gate for gate in DEFAULT_GATES if not gates.get(gate, True)}
    if not off:
        return
    if obj.get("kind") == "ResourceSlice":
        _drop_from_slice(obj.get("spec") or {}, off)
        had_groups = any("compatibilityGroups" in use for use in _uses(before or {}))
        if "DRADeviceCompatibilityGroups" in off and not had_groups:
            for use in _uses(obj):
                use.pop("compatibilityGroups", None)
    if obj.get("kind") == "ResourceClaim":
        _drop_from_claim(obj, off)


def _uses(obj: dict[str, Any]) -> list[dict[str, Any]]:
    devices = (obj.get("spec") or {}).get("devices") or ()
    return [use for device in devices for use in device.get("consumesCounters") or ()]


def _drop_from_slice(spec: dict[str, Any], off: set[str]) -> None:
    _drop(spec, _SLICE_FIELDS, off)
    for device in spec.get("devices") or ():
        _drop(device, _DEVICE_FIELDS, off)
        if "DRAConsumableCapacity" in off:
            for capacity in (device.get("capacity") or {}).values():
                capacity.pop("requestPolicy", None)


def _drop_from_claim(claim: dict[str, Any], off: set[str]) -> None:
    status = claim.get("status") or {}
    if "DRAResourceClaimDeviceStatus" in off:
        status.pop("devices", None)
    if "DRAConsumableCapacity" in off:
        for result in ((status.get("allocation") or {}).get("devices") or {}).get("results") or ():
            result.pop("shareID", None)
            result.pop("consumedCapacity", None)
    for request in ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ():
        if "DRAConsumableCapacity" in off:
            for wanted in (request.get("exactly") or {}, *(request.get("firstAvailable") or ())):
                wanted.pop("capacity", None)


def _drop(obj: dict[str, Any], fields: Mapping[str, tuple[str, ...]], off: set[str]) -> None:
    for gate in off & fields.keys():
        for field in fields[gate]:
            obj.pop(field, None)
