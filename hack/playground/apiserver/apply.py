"""JSON merge patch, and server-side apply for a list with several writers: `status.devices` of a claim.

`metadata.managedFields` contains the owners of the list's entries: of each condition by its type, and of each other
field as a whole. It does not use the API's notation, because no client here reads it.
"""

from __future__ import annotations

import json
from typing import Any

from playground.apiserver.failure import ApiFailure, Cause, bad_request, invalid
from playground.apiserver.resources import Resource
from playground.apiserver.store import Object, copy_json

APPLY_TYPE = "application/apply-patch+yaml"
_KEYS = ("device", "driver", "pool", "shareID")
_Field = tuple[str, str, str]
"""Key of the list's entry, name of the field or "" for the entry itself, type of the condition or ""."""


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the result of a JSON merge patch (RFC 7386). Nothing is modified in place."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def check_manager(manager: str) -> None:
    """Raise ApiFailure 422 if `manager` is empty."""
    if not manager:
        missing = Cause("fieldManager", "Required value: is required for apply patch", "FieldValueRequired")
        raise invalid("meta.k8s.io", "PatchOptions", "", [missing])


def applied_status(
    resource: Resource, current: Object, patch: Object, *, manager: str, force: bool
) -> Object:
    """Return the claim after `manager` applied `patch`, both in stored form.

    Fields that only `manager` owned and that the patch no longer contains are removed. Raises: ApiFailure 400, 422, or
    409 if another manager owns a field with a different value and `force` is not set.
    """
    check_manager(manager)
    uid = (patch.get("metadata") or {}).get("uid")
    if uid and uid != current["metadata"]["uid"]:
        cause = Cause("metadata.uid", f'Invalid value: "{uid}": field is immutable')
        raise invalid(resource.group, resource.kind, current["metadata"]["name"], [cause])
    result = copy_json(current)
    known: dict[str, set[_Field]] = {
        entry["manager"]: set(map(tuple, entry["owned"]))
        for entry in result["metadata"].get("managedFields") or ()
    }
    fields, wanted = _fields(result), _fields(patch)
    before = known.pop(manager, set())
    for other, owned in known.items():
        lost = {field for field in owned & wanted.keys() if fields.get(field) != wanted[field]}
        if lost and not force:
            text = f'Apply failed with 1 conflict: conflict with "{other}": .status.devices[{min(lost)[0]}]'
            raise ApiFailure(409, "Conflict", text, details={"name": min(lost)[0]})
        owned.difference_update(lost)
    for field in before.difference(wanted, *known.values()):
        fields.pop(field, None)
    result["metadata"]["managedFields"] = [
        {"manager": name, "operation": "Apply", "subresource": "status", "owned": sorted(owned)}
        for name, owned in sorted((known | {manager: set(wanted)}).items())
        if owned
    ]
    status = result.setdefault("status", {})
    status.pop("devices", None)
    if devices := _devices(fields | wanted):
        status["devices"] = devices
    return result


def _fields(claim: Object) -> dict[_Field, Any]:
    fields: dict[_Field, Any] = {}
    for entry in (claim.get("status") or {}).get("devices") or ():
        place = {name: entry[name] for name in _KEYS if entry.get(name) is not None}
        if not place:
            raise bad_request(f"associative list with keys has an element that omits all key fields {_KEYS}")
        key = json.dumps(place, separators=(",", ":"))
        fields[key, "", ""] = place
        fields |= {(key, name, ""): entry[name] for name in entry if name not in (*_KEYS, "conditions")}
        fields |= {(key, "conditions", str(one.get("type"))): one for one in entry.get("conditions") or ()}
    return fields


def _devices(fields: dict[_Field, Any]) -> list[Object]:
    devices = {key: dict(place) for (key, name, _), place in fields.items() if not name}
    for (key, name, kind), value in fields.items():
        if key in devices and kind:
            devices[key].setdefault(name, []).append(value)
        elif key in devices and name:
            devices[key][name] = value
    return list(devices.values())
