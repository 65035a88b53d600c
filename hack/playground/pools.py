"""The pools of a cluster as kube-scheduler sees them for one node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from dra_driver.cli.validation.rules.allocator import (
    AllocationError,
    Candidate,
    FreeDevices,
    devices_of,
    less,
)

Object = dict[str, Any]


def free_devices(slices: Sequence[Object], claims: Iterable[Object], node: str) -> FreeDevices:
    """Return devices and counters of the node's complete pools, without what other claims hold. Raises:
    AllocationError.
    """
    found = FreeDevices([], set())
    ordered = sorted(slices, key=lambda item: (*_pool_of(item), item["metadata"]["name"]))
    for pool, group in groupby(ordered, _pool_of):
        _add_pool(found, pool, [member["spec"] for member in group], node)
    return less(found, claims)


def _pool_of(item: Object) -> tuple[str, str]:
    return item["spec"]["driver"], item["spec"]["pool"]["name"]


def _add_pool(found: FreeDevices, pool: tuple[str, str], specs: list[Object], node: str) -> None:
    """Add the devices and counters of one pool, whose slices are in the order of their names."""
    here = [spec for spec in specs if _concerns(spec, node, pool)]
    newest = max((spec["pool"].get("generation", 0) for spec in here), default=None)
    if newest is None or newest < max(spec["pool"].get("generation", 0) for spec in specs):
        return  # nothing for this node, or only outdated slices
    members = [spec for spec in specs if spec["pool"].get("generation", 0) == newest]
    name = "/".join(pool)
    if len(members) != members[0]["pool"]["resourceSliceCount"]:
        found.unusable.append(f"pool {name} is being updated")
        return
    read = [(spec, devices_of([spec])) for spec in members]
    counters = {key: amount for _, devices in read for key, amount in devices.counters.items()}
    local: list[Candidate] = []
    remote: list[Candidate] = []
    for spec, devices in read:
        (local if _concerns(spec, node, pool) else remote).extend(
            replace(one, is_here=not spec.get("perDeviceNodeSelection") or _concerns(one.device, node, pool))
            for one in devices.candidates
        )
    known = len({one.name for one in local}) == len(local) and all(
        one.counters.keys() <= counters.keys() for one in (*local, *remote)
    )
    if not known:
        found.unusable.append(f"pool {name} is invalid")
        return
    found.candidates += local
    found.elsewhere += remote
    found.counters |= counters


def _concerns(where: Any, node: str, pool: tuple[str, str]) -> bool:
    """Whether a slice, or a device with its own node selection, is for a node. Raises: AllocationError."""
    if where.get("nodeSelector"):
        raise AllocationError(f"pool {'/'.join(pool)} selects nodes by their labels, which are not known")
    if where.get("perDeviceNodeSelection"):
        return any(_concerns(device, node, pool) for device in where.get("devices") or ())
    return bool(where.get("allNodes")) or where.get("nodeName") == node
