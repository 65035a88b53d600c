"""resource.k8s.io objects between the versions of the API; callers see v1 only.

v1beta2 has the shape of v1. v1beta1 keeps a device's content under `basic` and a claim's request flat
instead of under `exactly`. Source: k8s.io/api/resource. Nothing is modified in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")  # the first that is served is used

Object = dict[str, Any]

# What a v1beta1 request may carry beside its name and `firstAvailable`, and v1 keeps under `exactly`.
_NOT_EXACT = frozenset({"name", "firstAvailable"})


def to_version(obj: Object, version: str) -> Object:
    """A v1 object as `version` writes it; objects of other groups pass unchanged."""
    return _convert(obj, version, {"ResourceSlice": _flat_to_basic, "ResourceClaim": _claim_to_flat})


def from_version(obj: Object) -> Object:
    """An object of any served version, single or list, in the shape of v1."""
    if not _is_ours(obj):
        return obj
    if str(obj.get("kind", "")).endswith("List"):
        kind = str(obj["kind"]).removesuffix("List")
        items = obj.get("items")
        typed = (
            {"apiVersion": obj["apiVersion"], "kind": kind} | item if isinstance(item, dict) else item
            for item in (items if isinstance(items, list) else ())
        )
        return obj | {"apiVersion": f"{GROUP}/v1", "items": [from_version(item) for item in typed]}
    if obj["apiVersion"] == f"{GROUP}/v1beta1":
        return _convert(obj, "v1", {"ResourceSlice": _basic_to_flat, "ResourceClaim": _claim_from_flat})
    return obj | {"apiVersion": f"{GROUP}/v1"}


def _is_ours(obj: Any) -> bool:
    return isinstance(obj, dict) and str(obj.get("apiVersion", "")).startswith(f"{GROUP}/")


def _convert(obj: Object, version: str, by_kind: dict[str, Callable[[Object], Object]]) -> Object:
    if not _is_ours(obj):
        return obj
    result = obj | {"apiVersion": f"{GROUP}/{version}"}
    crosses = "v1beta1" in (version, str(obj["apiVersion"]).partition("/")[2])
    change = by_kind.get(str(obj.get("kind")))
    if crosses and change is not None and isinstance(obj.get("spec"), dict):
        result["spec"] = change(obj["spec"])
    return result


def _flat_to_basic(spec: Object) -> Object:
    return spec | _each(spec, "devices", _device_to_basic)


def _device_to_basic(device: Object) -> Object:
    content = {key: value for key, value in device.items() if key != "name"}
    return {key: value for key, value in device.items() if key == "name"} | {"basic": content}


def _basic_to_flat(spec: Object) -> Object:
    return spec | _each(spec, "devices", _device_from_basic)


def _device_from_basic(device: Object) -> Object:
    basic = device.get("basic") or {}
    return _without(device, "basic") | basic if isinstance(basic, dict) else device


def _claim_to_flat(spec: Object) -> Object:
    return _with_requests(spec, _request_to_flat)


def _claim_from_flat(spec: Object) -> Object:
    return _with_requests(spec, _request_from_flat)


def _request_to_flat(request: Object) -> Object:
    exactly = request.get("exactly") or {}
    return _without(request, "exactly") | exactly if isinstance(exactly, dict) else request


def _request_from_flat(request: Object) -> Object:
    exactly = {key: value for key, value in request.items() if key not in _NOT_EXACT}
    outer = {key: value for key, value in request.items() if key in _NOT_EXACT}
    return outer | {"exactly": exactly} if exactly else outer


def _with_requests(spec: Object, change: Callable[[Object], Object]) -> Object:
    devices = spec.get("devices")
    if not isinstance(devices, dict):
        return spec
    return spec | {"devices": devices | _each(devices, "requests", change)}


def _each(obj: Object, name: str, change: Callable[[Object], Object]) -> Object:
    """The list of that name, with each object in it changed. What is neither passes: no server wrote it, and whoever
    reads it says so."""
    if name not in obj:
        return {}
    items = obj[name] or []
    if not isinstance(items, list):
        return {name: items}
    return {name: [change(item) if isinstance(item, dict) else item for item in items]}


def _without(obj: Object, key: str) -> Object:
    return {name: value for name, value in obj.items() if name != key}
