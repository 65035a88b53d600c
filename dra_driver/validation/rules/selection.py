"""Device selectors of classes and requests, as the scheduler asks them of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.validation.rules.cel.values import CelError, quantity
from dra_driver.validation.rules.selectors import compiled


class SelectorError(Exception):
    """An expression that cannot be evaluated: not understood, or an attribute the device does not have."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as CEL sees it; attribute and capacity names are split into domain and identifier."""

    driver: str
    attributes: Mapping[str, Mapping[str, Any]]
    capacity: Mapping[str, Mapping[str, str]]
    allow_multiple_allocations: bool = False


Selects = Callable[[str, DeviceView], bool]


def view(driver: str, device: Mapping[str, Any]) -> DeviceView:
    """The view of a stored-form device; names without domain belong to the driver's."""
    attributes = {
        name: next(iter(value.values()), None) for name, value in (device.get("attributes") or {}).items()
    }
    capacity = {name: entry["value"] for name, entry in (device.get("capacity") or {}).items()}
    shareable = bool(device.get("allowMultipleAllocations"))
    return DeviceView(driver, _by_domain(attributes, driver), _by_domain(capacity, driver), shareable)


def selects(expression: str, device: DeviceView) -> bool:
    """Whether the device matches. Raises: SelectorError; NotJudgedError where nobody can say."""
    capacity = {
        domain: {name: quantity(value) for name, value in names.items()}
        for domain, names in device.capacity.items()
    }
    variable = {
        "driver": device.driver,
        "attributes": _Domains(device.attributes),
        "capacity": _Domains(capacity),
        "allowMultipleAllocations": device.allow_multiple_allocations,
    }
    try:
        return compiled(expression).matches(variable)
    except (CelError, InvalidConfigError) as error:
        raise SelectorError(str(error)) from error


class _Domains(dict[str, Any]):
    """A domain that a device has nothing of is empty."""

    def __missing__(self, key: str) -> dict[str, Any]:
        return {}


def _by_domain(values: Mapping[str, Any], driver: str) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        domain, slash, identifier = name.rpartition("/")
        result.setdefault(domain if slash else driver, {})[identifier] = value
    return result
