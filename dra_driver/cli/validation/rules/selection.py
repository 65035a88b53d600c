"""A device as selectors see it, and how a selector can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class SelectorError(Exception):
    """A selector fails on a device, such as a key that is missing; that ends the allocation of a claim."""


class NotJudgedError(Exception):
    """Nobody here can say what Kubernetes makes of a selector: no verdict is better than a wrong one."""


class Version(str):
    """An attribute of the kind `version`; one of the kind `string` is not equal to it in CEL."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as CEL sees it: attributes and capacities by domain and name, capacities as they are written."""

    driver: str
    attributes: Mapping[str, Mapping[str, Any]]
    capacity: Mapping[str, Mapping[str, str]]
    allow_multiple_allocations: bool = False


def view(driver: str, device: Mapping[str, Any]) -> DeviceView:
    """The view of a device in the shape of v1; names without a domain belong to that of its DRA driver."""
    attributes = {
        name: Version(content) if kind == "version" else content
        for name, entry in (device.get("attributes") or {}).items()
        for kind, content in entry.items()
    }
    capacity = {name: str(entry["value"]) for name, entry in (device.get("capacity") or {}).items()}
    shareable = bool(device.get("allowMultipleAllocations"))
    return DeviceView(driver, _by_domain(attributes, driver), _by_domain(capacity, driver), shareable)


def _by_domain(values: Mapping[str, Any], driver: str) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        domain, slash, identifier = name.rpartition("/")
        result.setdefault(domain if slash else driver, {})[identifier] = value
    return result
