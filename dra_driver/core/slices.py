"""The only builder of ResourceSlices: an inventory becomes the whole desired pool of this node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dra_driver.core.attributes import wire_device
from dra_driver.core.limits import (
    MAX_COUNTER_SETS_PER_SLICE,
    MAX_DEVICES_PER_SLICE,
    device_faults,
    pool_faults,
)
from dra_driver.core.sharing import shared_device
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import NO_SHARING, SharingPolicy

T = TypeVar("T")
JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SliceContent:
    """What one slice of a pool carries: devices or counter sets, never both (Kubernetes 1.35 and newer)."""

    devices: tuple[JsonObject, ...] = ()
    shared_counters: tuple[JsonObject, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """The desired state of one pool: its slices in index order. There is always one, if only an empty one,
    which tells "no devices" from "no driver"."""

    name: str
    slices: tuple[SliceContent, ...]
    faults: tuple[str, ...] = field(default=())


def build_pool(inventory: Inventory, node_name: str, sharing: SharingPolicy = NO_SHARING) -> Pool:
    """The pool of a node: devices in PCI order, chunked to the API's limits; same hardware, same bytes.

    Devices under a rule of `sharing` can be allocated several times, the others are as they are without it.
    A device that the API server would refuse is left out and told in `faults`, so that it never costs
    the node its other devices.
    """
    devices: list[JsonObject] = []
    faults: list[str] = []
    for offered in inventory.devices():
        device = wire_device(offered, inventory)
        rule = sharing.rule_for(offered)
        if rule is not None:
            device = shared_device(device, offered, rule)
        device_problems = device_faults(device)
        if device_problems:
            faults += device_problems
        else:
            devices.append(device)
    counter_sets: list[JsonObject] = []
    faults += pool_faults(devices, counter_sets)
    slices = [
        SliceContent(shared_counters=chunk) for chunk in _chunks(counter_sets, MAX_COUNTER_SETS_PER_SLICE)
    ]
    slices += [SliceContent(devices=chunk) for chunk in _chunks(devices, MAX_DEVICES_PER_SLICE)]
    return Pool(node_name, tuple(slices) or (SliceContent(),), tuple(faults))


def _chunks(items: Sequence[T], size: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield tuple(items[start : start + size])
