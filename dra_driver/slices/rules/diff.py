"""From the slices that exist and the pool that is wanted to the fewest writes.

The rules are those of the upstream publishing helper, so that a hand-over between drivers writes nothing:
the index stands in the object's name, a pool keeps its generation while no slice is created and at most
one changes, and what is obsolete is deleted before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from dra_driver.model.json_object import JsonObject
from dra_driver.slices.rules.build import Pool, SliceContent
from dra_driver.slices.rules.comparison import same_content

_MIN_INDEX_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Owner:
    """Who publishes: driver, node and the UID of the Node object, which owns the slices."""

    driver: str
    node_name: str
    node_uid: str


@dataclass(frozen=True, slots=True)
class SliceChanges:
    """Writes in the order in which they must happen: deletes, updates, creates (all in v1 shape)."""

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
    refused: Container[int] = (),
) -> SliceChanges:
    """What to write so that the node's slices are exactly the pool. `existing` are all slices of this
    driver on this node, of any pool; those of other pools are obsolete.

    `undeletable` are UIDs of slices that the API server does not delete. One that is obsolete but of the
    current generation would count as a part of the pool, so the pool leaves it behind in an older one. `refused` are
    the indexes of slices that the API server refused: they are tried again without a new generation for all.
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
    counted = [index for index in missing if index not in refused]
    several = len([index for index in changed if index not in refused]) > 1
    generation = current + 1 if counted or several or crowded else current
    if generation != current:
        changed = set(matched)
    return SliceChanges(
        deletes=tuple(foreign + obsolete),
        updates=tuple(_updated(matched[index], pool, index, generation, owner) for index in sorted(changed)),
        creates=tuple(_created(pool, index, generation, owner) for index in missing),
    )


def slice_index(entry: JsonObject) -> int:
    """The place in the pool of a slice that is to be written."""
    metadata = entry["metadata"]
    return int((metadata.get("name") or metadata["generateName"]).partition("-")[0], 16)


def _index_digits(count: int) -> int:
    return max(_MIN_INDEX_DIGITS, len(f"{max(count - 1, 0):x}"))


def _match(
    existing: Sequence[JsonObject], generation: int, count: int
) -> tuple[dict[int, JsonObject], list[JsonObject]]:
    """Existing slices by the index in their name, and those that are obsolete."""
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
    """Carry the time of an unchanged taint over, or each update would make it look new."""
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
    """Exactly what the garbage collector and the admission of other drivers expect; no more fields."""
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
    """A copy whose taints may be completed without touching the desired state."""
    copy = dict(device)
    if "taints" in copy:
        copy["taints"] = [dict(taint) for taint in copy["taints"]]
    return copy
