"""Server-side apply for the one place where several writers share a list: `status.devices` of a claim.

Who owns what is kept in `metadata.managedFields`, though not in the API's notation, which nobody reads here: of each
entry of the list its conditions by type, and everything else as a whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from playground.apiserver.failure import ApiFailure, Cause, bad_request, invalid
from playground.apiserver.resources import Resource
from playground.apiserver.store import Object

APPLY_TYPE = "application/apply-patch+yaml"
_KEYS = ("device", "driver", "pool", "shareID")
_FIELD = tuple[str, str]  # (name, type of the condition or "")
_Owned = dict[str, set[_FIELD]]  # by the key of the list's entry


def applied_status(
    resource: Resource, current: Object, patch: Object, *, manager: str, force: bool
) -> Object:
    """The claim after `manager` applied `patch`, both in stored form: what it no longer names and nobody else
    owns is gone.

    Raises: ApiFailure 400, 409 (others own a field with another value, without `force`), 422.
    """
    if not manager:
        missing = Cause("fieldManager", "Required value: is required for apply patch", "FieldValueRequired")
        raise invalid("meta.k8s.io", "PatchOptions", "", [missing])
    uid = (patch.get("metadata") or {}).get("uid")
    if uid and uid != current["metadata"]["uid"]:
        cause = Cause("metadata.uid", f'Invalid value: "{uid}": field is immutable')
        raise invalid(resource.group, resource.kind, current["metadata"]["name"], [cause])
    result = copy.deepcopy(current)
    known: dict[str, _Owned] = {
        entry["manager"]: {key: set(map(tuple, fields)) for key, fields in entry["owned"].items()}
        for entry in current["metadata"].get("managedFields") or ()
    }
    before = known.pop(manager, {})
    status = result.get("status") or {}
    devices = {_key(entry): entry for entry in status.get("devices") or ()}
    wanted = {_key(entry): entry for entry in (patch.get("status") or {}).get("devices") or ()}
    mine = {key: set(_fields(entry)) for key, entry in wanted.items()}
    _settle_conflicts(devices, wanted, mine, known, force=force)
    _remove_unowned(devices, before, mine, known)
    for key, entry in wanted.items():
        _lay_over(devices.setdefault(key, {}), entry)
    result["metadata"]["managedFields"] = [
        {
            "manager": name,
            "operation": "Apply",
            "subresource": "status",
            "owned": {key: sorted(fields) for key, fields in owned.items()},
        }
        for name, owned in sorted((known | {manager: mine}).items())
        if owned
    ]
    rest = {key: value for key, value in status.items() if key != "devices"}
    result["status"] = rest | ({"devices": list(devices.values())} if devices else {})
    return result


def _settle_conflicts(
    devices: dict[str, Object],
    wanted: dict[str, Object],
    mine: _Owned,
    known: dict[str, _Owned],
    *,
    force: bool,
) -> None:
    for manager, owned in known.items():
        for key in mine.keys() & owned.keys():
            lost = {
                field
                for field in mine[key] & owned[key]
                if _value(devices.get(key, {}), field) != _value(wanted[key], field)
            }
            if lost and not force:
                text = f'Apply failed with 1 conflict: conflict with "{manager}": .status.devices[{key}]'
                raise ApiFailure(409, "Conflict", text, details={"name": key})
            owned[key] -= lost


def _remove_unowned(
    devices: dict[str, Object], before: _Owned, mine: _Owned, known: dict[str, _Owned]
) -> None:
    for key in before.keys() & devices.keys():
        others = [owned[key] for owned in known.values() if key in owned]
        if key not in mine and not others:
            del devices[key]
            continue
        for name, kind in before[key].difference(mine.get(key, ()), *others):
            if kind:
                kept = [entry for entry in devices[key].get(name) or () if entry.get("type") != kind]
                devices[key][name] = kept
            else:
                devices[key].pop(name, None)


def _lay_over(entry: Object, applied: Object) -> None:
    by_type = {condition.get("type"): condition for condition in entry.get("conditions") or ()}
    by_type |= {condition.get("type"): condition for condition in applied.get("conditions") or ()}
    entry |= applied
    if by_type:
        entry["conditions"] = list(by_type.values())


def _fields(entry: Object) -> Iterator[_FIELD]:
    for name in entry:
        if name == "conditions":
            yield from ((name, str(condition.get("type"))) for condition in entry[name])
        elif name not in _KEYS:
            yield name, ""


def _value(entry: Object, field: _FIELD) -> Any:
    name, kind = field
    if not kind:
        return entry.get(name)
    return next((c for c in entry.get(name) or () if c.get("type") == kind), None)


def _key(entry: Object) -> str:
    named = {name: entry[name] for name in _KEYS if entry.get(name) is not None}
    if not named:
        raise bad_request(f"associative list with keys has an element that omits all key fields {_KEYS}")
    return "k:" + json.dumps(named, separators=(",", ":"))
