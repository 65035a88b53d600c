"""Device selectors: compiled once, checked without a device, and explained where a device does not match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.validation.rules.cel.program import program
from dra_driver.validation.rules.cel.refusals import CompileError, refuse
from dra_driver.validation.rules.cel.syntax import (
    Call,
    CelSyntaxError,
    Expression,
    Field,
    Index,
    Literal,
    Name,
    children,
    parse,
    terms,
)
from dra_driver.validation.rules.cel.values import (
    CelError,
    NotJudgedError,
    Quantity,
    Semver,
    quantity,
    type_name,
)

JsonObject = dict[str, Any]

MAX_EXPRESSION_BYTES = 10 * 1024
DEVICE_FIELDS = ("driver", "attributes", "capacity", "allowMultipleAllocations")

_COMPARISONS = {"==", "!=", "<", "<=", ">", ">="}
_METHOD_SIGNS = {"isGreaterThan": ">", "isLessThan": "<"}
_MOVES = {
    "index": "`index` is NVML's and moves when a GPU is drained or replaced; select by `uuid` or by "
    'device.attributes["resource.kubernetes.io"].pciBusID',
    "minor": "`minor` is the number of /dev/nvidiaN and may differ after a reboot; select by `uuid`",
}
_NAMES = (
    "contains startsWith endsWith matches lowerAscii upperAscii trim replace split substring indexOf lastIndexOf join "
    "format charAt find findAll size compareTo isGreaterThan isLessThan add sub sign isInteger asInteger "
    "asApproximateFloat major minor patch quantity isQuantity semver isSemver string int double has all exists "
    "exists_one map filter orValue hasValue"
)
_FUNCTIONS = frozenset(_NAMES.split())
"""What may have been meant by a name that is not known."""
_UNDECLARED = re.compile(r"undeclared reference to '([^']*)'\Z")


_NOT_EVERYWHERE = frozenset(
    {"profile", "parentUUID", "parentIndex", "parentMinor", "uuid", "index", "minor", "migCapable", "nvlinkLinks",
     "nvlinkDomain", "fabricClusterUUID", "fabricCliqueID", "addressingMode", "confidentialCompute",
     "numaNode", "pcieRoot", "multiprocessors"}
)  # fmt: skip
"""Attributes and capacities that only some machines have; to name one that a machine lacks is not a mistake."""


class _ByDomain(dict[str, dict[str, Any]]):
    """A domain that a device has nothing of is empty, not an error."""

    def __missing__(self, key: str) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Selector:
    """A compiled expression."""

    text: str
    tree: Expression

    def matches(self, device: Mapping[str, Any]) -> bool:
        """`device` is what `device_variable` makes. Raises: CelError, which ends the allocation of a claim."""
        result = program(self.text).value(device)
        if not isinstance(result, bool):
            raise CelError(f"the expression is a {type_name(result)}, not a bool")
        return result

    def score(self, device: Mapping[str, Any]) -> int:
        """How many of the terms that `&&` joins hold for the device."""
        return sum(_holds(term, device, self.text) for term in terms(self.tree))

    def why_not(self, device: Mapping[str, Any]) -> str:
        """The first term that does not hold, with the device's value: `memory is 81559Mi, wanted >= 100Gi`."""
        for term in terms(self.tree):
            if not _holds(term, device, self.text):
                return self._explained(term, device)
        return "it matches"

    def _explained(self, term: Expression, device: Mapping[str, Any]) -> str:
        try:
            return _comparison(term, device, self.text) or f"{_source(term, self.text)} is false"
        except (CelError, NotJudgedError) as error:
            return str(error)


@lru_cache(maxsize=1024)
def compiled(text: str) -> Selector:
    """Raises: InvalidConfigError if the API server would refuse it; NotJudgedError where nobody here can say."""
    if len(text.encode()) > MAX_EXPRESSION_BYTES:
        raise InvalidConfigError(f"is longer than {MAX_EXPRESSION_BYTES} bytes")
    tree, unread = _read(text)
    try:
        refuse(text, program(text).checked)
    except CompileError as error:
        if unread is not None:
            raise InvalidConfigError(f"is not valid CEL: {unread}") from error
        if tree is not None and _takes_whole_device(tree):
            raise NotJudgedError("it uses `device` as a whole") from error
        faults = tuple(dict.fromkeys(_worded(fault, line, column) for fault, line, column in error.faults))
        raise InvalidConfigError(f"does not compile: {'; '.join(faults)}", faults=faults) from error
    if tree is None:
        raise NotJudgedError(f"it cannot be read here: {unread}")
    if _takes_whole_device(tree):
        raise NotJudgedError("it uses `device` as a whole")
    return Selector(text, tree)


def _read(text: str) -> tuple[Expression | None, str | None]:
    """The tree that explanations are made from, or why there is none."""
    try:
        return parse(text), None
    except CelSyntaxError as error:
        return None, str(error)


def _takes_whole_device(tree: Expression) -> bool:
    """Whether `device` stands for itself anywhere, or has() asks for one of its fields."""
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        match part:
            case Name(name="device"):
                return True
            case Call(function="has", arguments=(Field(operand=Name(name="device")), *_)):
                return True
            case Field(operand=Name(name="device"), optional=False):
                continue
        waiting += children(part)
    return False


def _worded(fault: str, line: int, column: int) -> str:
    """A fault of the compiler, with what was probably meant."""
    reference = _UNDECLARED.match(fault)
    if reference is not None:
        name = reference[1]
        if name.startswith("device."):
            field = name.removeprefix("device.")
            near = difflib.get_close_matches(field, DEVICE_FIELDS, 1)
            meant = f"did you mean device.{near[0]}?" if near else f"there are {', '.join(DEVICE_FIELDS)}"
            return f"undefined field '{name}'; {meant}"
        near = difflib.get_close_matches(name.partition(".")[0], _FUNCTIONS - {name} | {"device"}, 1)
        return fault + (f"; did you mean {near[0]}?" if near else "")
    place = f" at character {column}" if column else ""
    return f"{fault} in line {line}{place}" if line > 1 else f"{fault}{place}"


def driver_asked_for(expression: str) -> str | None:
    """The driver that a selector names by `device.driver == "…"`; None if it names none."""
    tree, _ = _read(expression)
    for term in terms(tree) if tree is not None else ():
        if isinstance(term, Call) and term.function == "==":
            for side, other in (term.arguments, term.arguments[::-1]):
                is_driver = (
                    isinstance(side, Field) and side.name == "driver" and isinstance(side.operand, Name)
                )
                if is_driver and isinstance(other, Literal):
                    return str(other.value)
    return None


def device_variable(driver: str, device: Mapping[str, Any]) -> JsonObject:
    """The variable `device` of an expression, from a device in the wire shape of v1 of `driver`."""
    attributes, capacity = _ByDomain(), _ByDomain()
    for name, entry in (device.get("attributes") or {}).items():
        ((kind, value),) = entry.items()
        domain, key = _split(name, driver)
        attributes.setdefault(domain, {})[key] = Semver(value) if kind == "version" else value
    for name, entry in (device.get("capacity") or {}).items():
        domain, key = _split(name, driver)
        capacity.setdefault(domain, {})[key] = quantity(entry["value"])
    return {
        "driver": driver,
        "attributes": attributes,
        "capacity": capacity,
        "allowMultipleAllocations": bool(device.get("allowMultipleAllocations")),
    }


def hints(expression: str, driver: str, devices: list[JsonObject]) -> list[str]:
    """What is legal and yet hardly meant. `devices` are variables of the machine's devices, if there is one."""
    tree, _ = _read(expression)
    return [] if tree is None else list(dict.fromkeys(_hints(tree, driver, devices)))


def _hints(tree: Expression, driver: str, devices: list[JsonObject]) -> Iterator[str]:
    reference = _reference(tree)
    if reference is not None:
        yield from _reference_hints(*reference, driver, devices)
    if isinstance(tree, Call) and tree.function in ("==", "!="):
        for side, other in (tree.arguments, tree.arguments[::-1]):
            found = _reference(side)
            if found is not None and isinstance(other, Literal):
                yield from _type_hints(*found, other.value, devices)
    for child in children(tree):
        yield from _hints(child, driver, devices)


def _reference_hints(
    part: str, domain: str, name: str, driver: str, devices: list[JsonObject]
) -> Iterator[str]:
    if domain == driver and part == "attributes" and name in _MOVES:
        yield _MOVES[name]
    if "/" in domain:
        yield f'write the domain and the name apart: device.{part}["{domain.partition("/")[0]}"].{name}'
        return
    if (
        not devices
        or name in _NOT_EVERYWHERE
        or any(name in device[part].get(domain, {}) for device in devices)
    ):
        return
    elsewhere = "capacity" if part == "attributes" else "attributes"
    if any(name in device[elsewhere].get(domain, {}) for device in devices):
        kind = "a capacity" if elsewhere == "capacity" else "an attribute"
        yield f'{name} is {kind}: write device.{elsewhere}["{domain}"].{name}'
        return
    known = sorted({str(key) for device in devices for key in device[part].get(domain, {})})
    if not known:
        domains = sorted({str(key) for device in devices for key in device[part]})
        yield f'no device has {part} of the domain "{domain}"; there are: {", ".join(domains)}'
        return
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(known)}"
    yield f'no device has {part}["{domain}"].{name}{meant}'


def _type_hints(part: str, domain: str, name: str, value: Any, devices: list[JsonObject]) -> Iterator[str]:
    real = next((d[part].get(domain, {})[name] for d in devices if name in d[part].get(domain, {})), None)
    if isinstance(real, Semver) and isinstance(value, str):
        yield f'{name} is a version and equals no string; write {name} == semver("{_as_semver(value)}")'
    elif isinstance(real, Quantity):
        yield f'{name} is a quantity; write {name}.compareTo(quantity("{value}")) == 0'
    elif real is not None and not isinstance(real, Semver) and type_name(real) != type_name(value):
        yield f"{name} is a {type_name(real)} and equals no {type_name(value)}"


def _as_semver(text: str) -> str:
    return ".".join([*text.split("."), "0", "0"][:3])


def _reference(tree: Expression) -> tuple[str, str, str] | None:
    """("attributes" or "capacity", domain, name) of `device.attributes["domain"].name`."""
    match tree:
        case Field(operand=Index(operand=Field(operand=Name(name="device"), name=part), index=Literal(value=domain)),
                   name=name) | Index(
            operand=Index(operand=Field(operand=Name(name="device"), name=part), index=Literal(value=domain)),
            index=Literal(value=name)) if part in ("attributes", "capacity"):  # fmt: skip
            return (part, domain, name) if isinstance(domain, str) and isinstance(name, str) else None
    return None


def _evaluated(tree: Expression, device: Mapping[str, Any], text: str) -> Any:
    """The value of a part of an expression. Raises: CelError, also for a part that means nothing by itself."""
    try:
        return program(text[slice(*tree.span)]).value(device)
    except CompileError as error:
        raise CelError(str(error)) from error


def _holds(term: Expression, device: Mapping[str, Any], text: str) -> bool:
    try:
        return _evaluated(term, device, text) is True
    except (CelError, NotJudgedError):
        return False


def _comparison(term: Expression, device: Mapping[str, Any], text: str) -> str | None:
    """What a term compares, with the values; None if it is not a comparison. Raises: CelError."""
    if not isinstance(term, Call):
        return (
            f"{_short(term, text)} is {_shown(_evaluated(term, device, text))}" if _reference(term) else None
        )
    if term.function == "in" and len(term.arguments) == 2:
        key, where = term.arguments
        shown = _shown(_evaluated(key, device, text))
        return f"{shown} is not in {_source(where, text)}"
    if term.function in _COMPARISONS:
        left, right = term.arguments
        if isinstance(left, Call) and left.function == "compareTo" and left.target and _is_zero(right):
            right = left.arguments[0]
            left = left.target
        return _compared(left, term.function, right, device, text)
    if term.function in _METHOD_SIGNS and term.target is not None:
        sign = _METHOD_SIGNS[term.function]
        return _compared(term.target, sign, term.arguments[0], device, text)
    if term.target is not None and term.function in _FUNCTIONS and len(term.arguments) == 1:
        value, wanted = _evaluated(term.target, device, text), _evaluated(term.arguments[0], device, text)
        return f"{_short(term.target, text)} is {_shown(value)}, wanted {term.function}({_shown(wanted)})"
    return None


def _is_zero(tree: Expression) -> bool:
    return isinstance(tree, Literal) and tree.value == 0


def _compared(left: Expression, sign: str, right: Expression, device: Mapping[str, Any], text: str) -> str:
    value, wanted = _evaluated(left, device, text), _evaluated(right, device, text)
    note = ""
    if sign == "==" and type_name(value) != type_name(wanted) and value != wanted:
        note = f" ({type_name(value)} against {type_name(wanted)})"
    return f"{_short(left, text)} is {_shown(value)}, wanted {sign} {_shown(wanted)}{note}"


def _short(tree: Expression, text: str) -> str:
    reference = _reference(tree)
    if reference is not None:
        return reference[2]
    return tree.name if isinstance(tree, Field) else _source(tree, text)


def _source(tree: Expression, text: str) -> str:
    return " ".join(text[slice(*tree.span)].split())


def _shown(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() if not isinstance(value, Semver):
            return f'"{value}"'
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            return str(value)


def _split(name: str, driver: str) -> tuple[str, str]:
    domain, slash, key = name.rpartition("/")
    return (domain if slash else driver), key
