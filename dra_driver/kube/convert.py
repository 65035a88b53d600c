"""resource.k8s.io objects between the versions of the API; callers see v1 only.

v1beta2 has the shape of v1. v1beta1 keeps a device's content under `basic` and a claim's request flat
instead of under `exactly`. Source: k8s.io/api/resource. Nothing is modified in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")  # the first that is served is used

Object = dict[str, Any]

# What a v1beta1 request may carry beside its name and `firstAvailable`, and v1 keeps under `exactly`.
_NOT_EXACT = frozenset({"name", "firstAvailable"})


def to_version(obj: Object, version: str) -> Object:
    """A v1 object as `version` writes it; objects of other groups pass unchanged."""
    if not _is_ours(obj):
        return obj
    result = obj | {"apiVersion": f"{GROUP}/{version}"}
    return _changed(result, 0) if version == "v1beta1" else result


def from_version(obj: Object) -> Object:
    """An object of any served version, single or list, in the shape of v1."""
    if not _is_ours(obj):
        return obj
    result = obj | {"apiVersion": f"{GROUP}/v1"}
    if str(obj.get("kind", "")).endswith("List"):
        kind = str(obj["kind"]).removesuffix("List")
        items = obj.get("items")
        typed = (
            {"apiVersion": obj["apiVersion"], "kind": kind} | item if isinstance(item, dict) else item
            for item in (items if isinstance(items, list) else ())
        )
        return result | {"items": [from_version(item) for item in typed]}
    return _changed(result, 1) if obj["apiVersion"] == f"{GROUP}/v1beta1" else result


def _is_ours(obj: Any) -> bool:
    return isinstance(obj, dict) and str(obj.get("apiVersion", "")).startswith(f"{GROUP}/")


def _device_to_basic(device: Object) -> Object:
    return (
        {"name": device["name"], "basic": _without(device, "name")} if "name" in device else {"basic": device}
    )


def _device_from_basic(device: Object) -> Object:
    basic = device.get("basic") or {}
    return _without(device, "basic") | basic if isinstance(basic, dict) else device


def _request_to_flat(request: Object) -> Object:
    exactly = request.get("exactly") or {}
    return _without(request, "exactly") | exactly if isinstance(exactly, dict) else request


def _request_from_flat(request: Object) -> Object:
    exactly = {key: value for key, value in request.items() if key not in _NOT_EXACT}
    outer = {key: value for key, value in request.items() if key in _NOT_EXACT}
    return outer | {"exactly": exactly} if exactly else outer


_LISTS: Mapping[str, tuple[tuple[str, ...], Callable[[Object], Object], Callable[[Object], Object]]] = {
    "ResourceSlice": (("spec", "devices"), _device_to_basic, _device_from_basic),
    "ResourceClaim": (("spec", "devices", "requests"), _request_to_flat, _request_from_flat),
}
"""Where in each kind the list is whose items differ, and what makes them those of v1beta1, and those of v1."""


def _changed(obj: Object, direction: int) -> Object:
    found = _LISTS.get(str(obj.get("kind")))
    if found is None:
        return obj
    path, *changes = found
    changed: Object = _at(obj, path, changes[direction])
    return changed


def _at(value: Any, path: Sequence[str], change: Callable[[Object], Object]) -> Any:
    """The value with each item of the list at the path changed. What is not as it should be passes: no server wrote it,
    and whoever reads it says so."""
    if not path:
        items = value or []
        if not isinstance(items, list):
            return items
        return [change(item) if isinstance(item, dict) else item for item in items]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    return value | {path[0]: _at(value[path[0]], path[1:], change)}


def _without(obj: Object, key: str) -> Object:
    return {name: value for name, value in obj.items() if name != key}
