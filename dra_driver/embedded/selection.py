"""Device selectors of classes and requests: the common part of CEL, and all of it where cel-python is installed.

The subset is terms joined by `&&`: `device.driver`, `device.allowMultipleAllocations` and
`device.attributes["domain"].name` compared by `==` or `!=` with a literal, a bare or negated boolean, and
`"name" in device.attributes["domain"]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dra_driver.embedded.apiserver.quantity import parse_quantity

_STRING = r"\"[^\"\\]*\"|'[^'\\]*'"
_ATTRIBUTE = rf"device\.attributes\[(?P<domain>{_STRING})\]\.(?P<name>\w+)"
_TERM = re.compile(
    rf"(?P<not>!\s*)?(?:(?P<plain>device\.(?:driver|allowMultipleAllocations))|{_ATTRIBUTE})"
    rf"(?:\s*(?P<operator>==|!=)\s*(?P<literal>{_STRING}|-?\d+|true|false))?"
)
_MEMBER = re.compile(rf"(?P<key>{_STRING})\s+in\s+device\.attributes\[(?P<domain>{_STRING})\]")
_AND = re.compile(r"\s*&&\s*")


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
    """Whether the device matches. Raises: SelectorError."""
    terms = _terms(expression.strip())
    if terms is None:
        return _evaluate_with_library(expression, device)
    return all(_holds(term, device) for term in terms)


def _terms(expression: str) -> list[re.Match[str]] | None:
    """The terms between `&&`; None if the expression is beyond the subset."""
    found, position = [], 0
    while True:
        term = _TERM.match(expression, position) or _MEMBER.match(expression, position)
        if term is None:
            return None
        found.append(term)
        if term.end() == len(expression):
            return found
        joint = _AND.match(expression, term.end())
        if joint is None:
            return None
        position = joint.end()


def _by_domain(values: Mapping[str, Any], driver: str) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        domain, slash, identifier = name.rpartition("/")
        result.setdefault(domain if slash else driver, {})[identifier] = value
    return result


def _holds(term: re.Match[str], device: DeviceView) -> bool:
    groups = term.groupdict()
    if "key" in groups:
        return groups["key"][1:-1] in device.attributes.get(groups["domain"][1:-1], {})
    value: Any
    match groups["plain"]:
        case "device.driver":
            value = device.driver
        case "device.allowMultipleAllocations":
            value = device.allow_multiple_allocations
        case _:
            value = _attribute(groups["domain"][1:-1], groups["name"], device)
    if groups["operator"] is None:
        if not isinstance(value, bool):
            raise SelectorError(f"{term[0]!r} is no boolean")
        return value != bool(groups["not"])
    if groups["not"]:
        raise SelectorError(f"{term[0]!r} negates a {type(value).__name__}")
    wanted = _literal(groups["literal"])
    if type(wanted) is not type(value):
        raise SelectorError(f"{term[0]!r} compares a {type(value).__name__} with a {type(wanted).__name__}")
    return (value == wanted) == (groups["operator"] == "==")


def _attribute(domain: str, name: str, device: DeviceView) -> Any:
    try:
        return device.attributes.get(domain, {})[name]
    except KeyError:
        raise SelectorError(f"no such key: {domain}/{name}") from None


def _literal(text: str) -> str | int | bool:
    if text in ("true", "false"):
        return text == "true"
    return text[1:-1] if text[0] in "\"'" else int(text)


def _evaluate_with_library(expression: str, device: DeviceView) -> bool:
    try:
        from celpy.adapter import json_to_cel
        from celpy.evaluation import CELEvalError
    except ImportError:
        raise SelectorError(
            f"selector {expression!r} is beyond the built-in subset of CEL; install cel-python"
        ) from None
    attributes = {domain: dict(names) for domain, names in device.attributes.items()}
    capacity = {
        domain: {name: _amount(value) for name, value in names.items()}
        for domain, names in device.capacity.items()
    }
    shown = {
        "driver": device.driver,
        "attributes": attributes,
        "capacity": capacity,
        "allowMultipleAllocations": device.allow_multiple_allocations,
    }
    try:
        result = _program(expression).evaluate({"device": json_to_cel(shown)})
    except CELEvalError as error:
        raise SelectorError(f"selector {expression!r}: {' '.join(str(error).split())}") from error
    return bool(result)


@cache
def _program(expression: str) -> Any:
    from celpy import Environment, celtypes
    from celpy.celparser import CELParseError

    environment = Environment()
    functions: dict[str, Any] = {
        "quantity": lambda text: celtypes.DoubleType(_amount(str(text))),
        "compareTo": lambda left, right: celtypes.IntType((left > right) - (left < right)),
        "isGreaterThan": lambda left, right: celtypes.BoolType(left > right),
        "isLessThan": lambda left, right: celtypes.BoolType(left < right),
    }
    try:
        return environment.program(environment.compile(expression), functions=functions)
    except CELParseError as error:
        raise SelectorError(f"selector {expression!r} is not valid CEL: {error}") from error


def _amount(value: str) -> float:
    parsed = parse_quantity(value)
    if parsed is None:
        raise SelectorError(f"{value!r} is no quantity")
    return float(parsed)
