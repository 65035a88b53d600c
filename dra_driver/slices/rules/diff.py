"""Computes the fewest writes that turn existing slices into a desired pool, and finds fields that an API server
dropped.

The rules match those of the upstream publishing helper, so no slice is rewritten when one driver takes over from
another. A slice's index is in the object's name. A pool keeps its generation if no slice is created and at most one
changes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime, timedelta
from typing import Any, Final

from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import same_quantity
from dra_driver.slices.rules.build import Pool, SliceContent

_MIN_INDEX_DIGITS = 5
MAX_GENERATION: Final = 2**63 - 1
"""The API server refuses a larger one with 400."""
Path = tuple[str | int, ...]
UNKNOWN_GATE: Final = "unknown"
PARTITIONS_GATE: Final = "DRAPartitionableDevices"
TAINTS_GATE: Final = "DRADeviceTaints"
SHARES_GATE: Final = "DRAConsumableCapacity"
GROUPS_GATE: Final = "DRADeviceCompatibilityGroups"

Drop = tuple[str, str]
"""The path of a missing or changed field, and its feature gate."""

_COMPARED = ("devices", "sharedCounters")
_GATES: Final[Mapping[str, str]] = {
    "taints": TAINTS_GATE,
    "sharedCounters": PARTITIONS_GATE,
    "consumesCounters": PARTITIONS_GATE,
    "compatibilityGroups": GROUPS_GATE,
    "allowMultipleAllocations": SHARES_GATE,
    "requestPolicy": SHARES_GATE,
}


@dataclass(frozen=True, slots=True)
class Owner:
    driver: str
    node_name: str
    node_uid: str


@dataclass(frozen=True, slots=True)
class SliceChanges:
    deletes: tuple[JsonObject, ...] = ()
    updates: tuple[JsonObject, ...] = ()
    creates: tuple[JsonObject, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.deletes or self.updates or self.creates)


def slice_changes(
    pool: Pool,
    existing: Iterable[JsonObject],
    owner: Owner,
    undeletable: Container[str] = (),
) -> SliceChanges:
    """Return the writes after which the node's slices match the pool exactly.

    `existing` are all slices of this driver on this node. If a slice in `undeletable` (UIDs) is obsolete and has the
    current generation, it would count as part of the pool, so the pool moves to a new generation. After the last
    generation, all slices are deleted and created again, because the scheduler ignores a lower one.
    """
    ours = [entry for entry in existing if entry["spec"]["pool"]["name"] == pool.name]
    foreign = [entry for entry in existing if entry["spec"]["pool"]["name"] != pool.name]
    current = max((entry["spec"]["pool"]["generation"] for entry in ours), default=0)
    matched, obsolete = _match(ours, current, len(pool.slices))
    missing = [index for index in range(len(pool.slices)) if index not in matched]
    changed = {index for index, entry in matched.items() if not _is_current(entry, pool, index, owner)}
    crowded = any(
        entry["spec"]["pool"]["generation"] == current and entry["metadata"].get("uid") in undeletable
        for entry in obsolete
    )
    generation = current + 1 if missing or len(changed) > 1 or crowded else current
    if generation > MAX_GENERATION:
        if not any(entry["metadata"].get("uid") in undeletable for entry in ours):
            return SliceChanges(
                deletes=tuple(foreign + ours),
                creates=tuple(_created(pool, index, 1, owner) for index in range(len(pool.slices))),
            )
        generation = current  # a lower one would be ignored as long as the undeletable slice exists
    if generation != current:
        changed = set(matched)
    return SliceChanges(
        deletes=tuple(foreign + obsolete),
        updates=tuple(_updated(matched[index], pool, index, generation, owner) for index in sorted(changed)),
        creates=tuple(_created(pool, index, generation, owner) for index in missing),
    )


def slice_index(entry: JsonObject) -> int:
    metadata = entry["metadata"]
    return int((metadata.get("name") or metadata["generateName"]).partition("-")[0], 16)


def _index_digits(count: int) -> int:
    return max(_MIN_INDEX_DIGITS, len(f"{max(count - 1, 0):x}"))


def _match(
    existing: Sequence[JsonObject], generation: int, count: int
) -> tuple[dict[int, JsonObject], list[JsonObject]]:
    matched: dict[int, JsonObject] = {}
    obsolete: list[JsonObject] = []
    pattern = re.compile(rf"^([0-9a-f]{{{_index_digits(count)}}})-")
    for entry in sorted(existing, key=lambda item: str(item["metadata"]["name"])):
        name = pattern.match(entry["metadata"]["name"])
        index = int(name[1], 16) if name else count
        outdated = entry["spec"]["pool"]["generation"] < generation
        if outdated or index >= count or index in matched:
            obsolete.append(entry)
        else:
            matched[index] = entry
    return matched, obsolete


def _is_current(entry: JsonObject, pool: Pool, index: int, owner: Owner) -> bool:
    spec = entry["spec"]
    wanted = pool.slices[index]
    return (
        spec["pool"]["resourceSliceCount"] == len(pool.slices)
        and spec.get("nodeName") == owner.node_name
        and _has_owner(entry, owner)
        and not any(spec.get(key) for key in ("allNodes", "nodeSelector", "perDeviceNodeSelection"))
        and same_content(spec.get("devices") or [], wanted.devices)
        and same_content(spec.get("sharedCounters") or [], wanted.shared_counters)
    )


def _has_owner(entry: JsonObject, owner: Owner) -> bool:
    references = entry["metadata"].get("ownerReferences") or []
    return any(reference.get("uid") == owner.node_uid for reference in references)


def _updated(entry: JsonObject, pool: Pool, index: int, generation: int, owner: Owner) -> JsonObject:
    metadata = dict(entry["metadata"])
    metadata["ownerReferences"] = [_owner_reference(owner)]
    spec = _spec(pool, index, generation, owner)
    _keep_taint_times(entry["spec"].get("devices") or [], spec.get("devices", []))
    return {**entry, "metadata": metadata, "spec": spec}


def _keep_taint_times(existing: Sequence[JsonObject], wanted: Sequence[JsonObject]) -> None:
    """Copy the time of unchanged taints, which would otherwise look new after each update."""
    times = {
        (device["name"], taint["key"], taint.get("value"), taint["effect"]): taint.get("timeAdded")
        for device in existing
        for taint in device.get("taints") or []
    }
    for device in wanted:
        for taint in device.get("taints", []):
            known = times.get((device["name"], taint["key"], taint.get("value"), taint["effect"]))
            if known is not None:
                taint.setdefault("timeAdded", known)


def _created(pool: Pool, index: int, generation: int, owner: Owner) -> JsonObject:
    digits = _index_digits(len(pool.slices))
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "generateName": f"{index:0{digits}x}-{owner.driver}-{owner.node_name}-",
            "ownerReferences": [_owner_reference(owner)],
        },
        "spec": _spec(pool, index, generation, owner),
    }


def _owner_reference(owner: Owner) -> JsonObject:
    """Return the fields that the garbage collector and the admission of other drivers expect."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "name": owner.node_name,
        "uid": owner.node_uid,
        "controller": True,
    }


def _spec(pool: Pool, index: int, generation: int, owner: Owner) -> JsonObject:
    content: SliceContent = pool.slices[index]
    spec: JsonObject = {
        "driver": owner.driver,
        "nodeName": owner.node_name,
        "pool": {
            "name": pool.name,
            "generation": max(generation, 1),
            "resourceSliceCount": len(pool.slices),
        },
    }
    if content.devices:
        spec["devices"] = [_copied(device) for device in content.devices]
    if content.shared_counters:
        spec["sharedCounters"] = [dict(entry) for entry in content.shared_counters]
    return spec


def _copied(device: JsonObject) -> JsonObject:
    """Copy, so that adding taint times does not change the desired state."""
    copy = dict(device)
    if "taints" in copy:
        copy["taints"] = [dict(taint) for taint in copy["taints"]]
    return copy


def same_content(existing: Any, wanted: Any) -> bool:
    return next(differences(existing, wanted), None) is None


def differences(
    existing: Any, wanted: Any, path: Path = (), *, are_quantities: bool = False
) -> Iterator[Path]:
    """Yield the paths at which `existing` differs from `wanted`.

    Quantities are compared by value; absent and empty are equal. A taint's `timeAdded` may be the server's, or differ
    by one second, because the server rounds.
    """
    if _is_empty(existing) and _is_empty(wanted):
        return
    if isinstance(existing, Mapping) and isinstance(wanted, Mapping):
        keys = existing.keys() | wanted.keys()
        for key in sorted(keys):
            pair = existing.get(key), wanted.get(key)
            # The other keys distinguish a taint, a capacity and a counter.
            if "effect" in keys:
                if not (key == "timeAdded" and _is_same_second(*pair)):
                    yield from differences(*pair, (*path, key))
                continue
            is_amount = key == "value" or (key == "requestPolicy" and "value" in keys)
            yield from differences(*pair, (*path, key), are_quantities=are_quantities or is_amount)
    elif (
        isinstance(existing, list | tuple)
        and isinstance(wanted, list | tuple)
        and len(existing) == len(wanted)
    ):
        for index, pair in enumerate(zip(existing, wanted, strict=True)):
            yield from differences(*pair, (*path, index), are_quantities=are_quantities)
    elif not (_is_same(existing, wanted) or (are_quantities and same_quantity(existing, wanted))):
        yield path


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, ())


def _is_same(existing: Any, wanted: Any) -> bool:
    return type(existing) is type(wanted) and bool(existing == wanted)


def _is_same_second(existing: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    try:
        apart = datetime.fromisoformat(existing) - datetime.fromisoformat(wanted)
    except (TypeError, ValueError):
        return False
    return abs(apart) <= timedelta(seconds=1)


def dropped_fields(sent: dict[str, Any], returned: dict[str, Any]) -> tuple[Drop, ...]:
    sent_spec, returned_spec = sent.get("spec") or {}, returned.get("spec") or {}
    found = (
        path
        for key in _COMPARED
        for path in differences(returned_spec.get(key), sent_spec.get(key), ("spec", key))
    )
    return tuple((_text(path), _gate(path)) for path in found)


def fields_of(gates: Set[str]) -> list[Drop]:
    return [(f"spec.devices[].{name}", gate) for name, gate in _GATES.items() if gate in gates]


def without_fields(pool: Pool, gates: Set[str]) -> Pool:
    if not gates:
        return pool
    slices = (
        replace(content, devices=tuple(_device_without(device, gates) for device in content.devices))
        for content in pool.slices
    )
    return replace(pool, slices=tuple(slices))


def _device_without(device: dict[str, Any], gates: Set[str]) -> dict[str, Any]:
    kept = _without(device, gates)
    if "capacity" in kept:
        kept["capacity"] = {name: _without(entry, gates) for name, entry in kept["capacity"].items()}
    return kept


def _without(fields: dict[str, Any], gates: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if _GATES.get(name) not in gates}


def _text(path: Path) -> str:
    parts = (
        f".{part}" if isinstance(part, str) and part.replace("_", "").isalnum() else f"[{part}]"
        for part in path
    )
    return "".join(parts).removeprefix(".")


def _gate(path: Path) -> str:
    return next(
        (_GATES[part] for part in reversed(path) if isinstance(part, str) and part in _GATES), UNKNOWN_GATE
    )
