"""Fields of JSON documents that only a newer release knows. They are kept at every level when this release writes the
document again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

JsonObject = dict[str, Any]

_IDENTITY: Final[Mapping[str, tuple[str, ...]]] = {
    "results": ("request", "driver", "pool", "device", "shareID"),
    "configs": ("source", "driver", "requests", "parameters"),
    "devices": ("device", "shareID"),
    "pods": ("uid",),
    "steps": ("kind", "gpuUUID", "device", "spec.device"),
    "states": ("gpuUUID", "gpuInstance", "computeInstance"),
    "reasons": ("key", "value"),
}
"""The fields that identify an entry of a list, for each list of objects that is written."""
_KIND = "kind"


def unknown_fields(document: Mapping[str, Any], understood: Mapping[str, Any]) -> JsonObject:
    """The fields of `document` that are not in `understood`, which is what this release would write after reading it.

    Nested objects are compared too, and the entries of the lists in the table above, each by its own key. An object
    with a kind is kept with its kind, since its fields mean nothing in an object of another kind.
    """
    found: JsonObject = {}
    for name, value in document.items():
        known = understood.get(name)
        if name not in understood:
            found[name] = value
        elif isinstance(value, Mapping) and isinstance(known, Mapping):
            inner = unknown_fields(value, known)
            if inner:
                found[name] = inner | ({_KIND: known[_KIND]} if _KIND in known else {})
        elif name in _IDENTITY and isinstance(value, list) and isinstance(known, list):
            entries = _unknown_in_entries(name, value, known)
            if entries:
                found[name] = entries
    return found


def with_unknown_fields(document: Mapping[str, Any], unknown: Mapping[str, Any]) -> JsonObject:
    """`document` with the fields that `unknown_fields` found, in the objects that still exist. A known field is never
    replaced."""
    result = dict(document)
    for name, value in unknown.items():
        known = result.get(name)
        if name not in result:
            result[name] = value
        elif not isinstance(value, Mapping):
            continue
        elif isinstance(known, Mapping):
            if value.get(_KIND, known.get(_KIND)) == known.get(_KIND):
                result[name] = with_unknown_fields(known, value)
        elif name in _IDENTITY and isinstance(known, list):
            result[name] = [
                with_unknown_fields(entry, value.get(key, {})) for key, entry in _keyed(name, known)
            ]
    return result


def _unknown_in_entries(name: str, entries: Sequence[Any], understood: Sequence[Any]) -> JsonObject:
    found: JsonObject = {}
    for (key, known), entry in zip(_keyed(name, understood), entries, strict=False):
        inner = unknown_fields(entry, known)
        if inner:
            found[key] = inner
    return found


def _keyed(name: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each entry with its identity; a second entry with the same identity gets another one."""
    seen: dict[str, int] = {}
    for entry in entries:
        identity = json.dumps([_at(entry, path) for path in _IDENTITY[name]], sort_keys=True)
        number = seen[identity] = seen.get(identity, 0) + 1
        yield f"{number} {identity}", entry


def _at(entry: Mapping[str, Any], path: str) -> Any:
    """The value at a path with dots; None if there is none."""
    value: Any = entry
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
