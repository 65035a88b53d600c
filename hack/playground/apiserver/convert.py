"""Between the stored form, resource.k8s.io/v1, and the version of a request.

Written apart from the driver's own conversion, so that each checks the other.
"""

from __future__ import annotations

from typing import Any

from playground.apiserver.json_copy import copy_json
from playground.apiserver.resources import RESOURCE_GROUP, Resource


def api_version(resource: Resource, version: str) -> str:
    """`apiVersion` of an object of this resource."""
    return f"{resource.group}/{version}" if resource.group else version


def decode(resource: Resource, version: str, obj: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of a received object in stored form."""
    stored = copy_json(obj)
    stored["apiVersion"] = api_version(resource, "v1")
    stored["kind"] = resource.kind
    if resource.group == RESOURCE_GROUP and version == "v1beta1":
        for device in _devices(resource, stored):
            device.update(device.pop("basic", None) or {})
        for request in _requests(resource, stored):
            exact = {k: request.pop(k) for k in list(request) if k not in ("name", "firstAvailable")}
            if exact:
                request["exactly"] = exact
    return stored


def encode(resource: Resource, version: str, stored: dict[str, Any]) -> dict[str, Any]:
    """A stored object as `version` shows it; not a copy if nothing differs but the version."""
    shown = {"kind": resource.kind, "apiVersion": api_version(resource, version)}
    if resource.group != RESOURCE_GROUP or version != "v1beta1":
        return shown | {key: value for key, value in stored.items() if key not in shown}
    old = copy_json(stored)
    for device in _devices(resource, old):
        device["basic"] = {key: device.pop(key) for key in list(device) if key != "name"}
    for request in _requests(resource, old):
        request.update(request.pop("exactly", None) or {})
    return old | shown


def _devices(resource: Resource, obj: dict[str, Any]) -> list[dict[str, Any]]:
    if resource.kind != "ResourceSlice":
        return []
    return [device for device in (obj.get("spec") or {}).get("devices") or () if isinstance(device, dict)]


def _requests(resource: Resource, obj: dict[str, Any]) -> list[dict[str, Any]]:
    spec = obj.get("spec") or {}
    if resource.kind == "ResourceClaimTemplate":
        spec = spec.get("spec") or {}
    elif resource.kind != "ResourceClaim":
        return []
    requests = (spec.get("devices") or {}).get("requests") or ()
    return [request for request in requests if isinstance(request, dict)]
