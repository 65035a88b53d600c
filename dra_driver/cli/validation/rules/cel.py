"""Evaluates CEL selectors as Kubernetes does, with cel-expr-python, plus quantities and versions.

The image does not include the package. Missing here: libraries for networks and URLs, some list functions, find(),
and cost limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass
from dra_driver.model.units import parse_quantity


class SelectorError(Exception):
    """A selector fails on a device. That ends the allocation of a claim."""


class NotJudgedError(Exception):
    """Only the API server can evaluate the selector."""


class Version(str):
    """In CEL it is not equal to a `string`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Attributes and unparsed capacities by domain and name."""

    driver: str
    attributes: Mapping[str, Mapping[str, Any]]
    capacity: Mapping[str, Mapping[str, str]]
    allow_multiple_allocations: bool = False


def view(driver: str, device: Mapping[str, Any]) -> DeviceView:
    """Return the view of a v1 device. Names without a domain belong to the driver's domain."""
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


_LIBRARIES = """
extensions:
- {name: strings, version: 2}
- {name: lists, version: 2}
- name: sets
- {name: optional, version: 2}
- name: bindings
- name: two-var-comprehensions
"""
_ONLY_KUBERNETES = frozenset(
    {"authorizer", "cidr", "find", "findAll", "includes", "indexOf", "ip", "isCIDR", "isIP", "isSorted", "isURL",
     "lastIndexOf", "max", "min", "named", "sum", "url"}
)  # fmt: skip
"""Functions that the package lacks, at least for lists."""
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?\Z",
    re.ASCII,
)
_FAULT = re.compile(r"^(?:\w+: )?ERROR: <input>:(\d+):(\d+): (.*)$", re.MULTILINE)
_UNKNOWN = re.compile(r"(?:undeclared reference to|found no matching overload for) '([^']*)'")
_CODE = re.compile(r"^[A-Z_]+: ")
_MISSING = re.compile(r'Key not found in map : "?([^"]*)"?$')
_INDEXED = re.compile(r"""device\.(?:attributes|capacity)\[\??(["'])([^"'\\]*)\1\]""")
_ASKED = re.compile(r"""(["'])([^"'\\]*)\1\s+in\s+device\.(?:attributes|capacity)\b(?!\s*[.\[])""")
_NOISE = re.compile(r" \(in container ''\)| expecting \{.*\}| \[[A-Z_]+\]$")
_FIELDS = "device.driver, device.attributes, device.capacity and device.allowMultipleAllocations"
_NAME_IN_BRACKETS = re.compile(r"""device\.(attributes|capacity)\[\??(["'])(?:([^"'\\/]+)/)?(\w+)\2\]""")
COMPARED = 'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("40Gi")) >= 0'
_INT64 = 1 << 63


def reading(text: str) -> str:
    found = _NAME_IN_BRACKETS.search(text)
    kind, domain, name = (
        ("attributes", None, "productName") if found is None else (found[1], found[3], found[4])
    )
    return f'device.{kind}["{domain or "gpu.nvidia.com"}"].{name}: the domain in brackets, then the name'


def program(text: str) -> Callable[[DeviceView], bool]:
    """Compile a selector into a function of a device, which raises SelectorError.

    Raises: ImportError without the package; InvalidConfigError if it does not compile; NotJudgedError.
    """
    try:
        expression = _environment().compile(text)
    except RuntimeError as error:
        raise _refusal(str(error), text) from None
    kind = expression.return_type().name()
    if kind not in ("BOOL", "DYN"):
        raise InvalidConfigError(f"does not compile: it must evaluate to bool, not {kind.lower()}")
    # A domain without entries is empty, unless the selector tests whether it exists.
    asked = {name for _, name in _ASKED.findall(text)}
    domains = {name for _, name in _INDEXED.findall(text)} - asked

    def matches(device: DeviceView) -> bool:
        data = {
            "device.driver": device.driver,
            "device.allowMultipleAllocations": device.allow_multiple_allocations,
            "device.attributes": _filled(domains, device.attributes, _value),
            "device.capacity": _filled(domains, device.capacity, _quantity),
        }
        result = expression.eval(data=data)
        if result.type().name() == "ERROR":
            raise SelectorError(_MISSING.sub(r"no such key: \1", _CODE.sub("", str(result.value()))))
        if result.type().name() != "BOOL":
            raise SelectorError(f"the expression evaluates to {result.type().name().lower()}, not bool")
        return bool(result.plain_value())

    return matches


def _refusal(message: str, selector: str) -> InvalidConfigError | NotJudgedError:
    faults = []
    for line, column, text in _FAULT.findall(message):
        unknown = _UNKNOWN.match(text)
        if unknown is not None and unknown[1] in _ONLY_KUBERNETES:
            return NotJudgedError(f"the selector uses {unknown[1]}(), which only the API server supports")
        meant = f"; available: {_FIELDS}" if unknown is not None and unknown[1].startswith("device.") else ""
        if "kubernetes.Quantity" in text:
            meant = f"; compare amounts as in {COMPARED}"
        elif "(map(string, dyn)" in text:
            meant = f"; write {reading(selector)}"
        elif unknown is not None and not meant:
            names = [name.removeprefix(".") for name in _FUNCTIONS]
            near = ["semver"] if unknown[1] == "version" else get_close_matches(unknown[1], names, 1)
            meant = f"; did you mean {near[0]}()?" if near else ""
        where = f"in line {line} at character {column}" if int(line) > 1 else f"at character {column}"
        faults.append(f"{_NOISE.sub('', text)} {where}{meant}")
    if not faults:  # not compiled, for example because it is nested deeper than the package supports
        return NotJudgedError(f"cannot compile the selector: {_NOISE.sub('', _CODE.sub('', message))}")
    return InvalidConfigError(f"does not compile: {'; '.join(faults)}")


def _filled(
    domains: set[str], values: Mapping[str, Mapping[str, Any]], convert: Callable[[Any], Any]
) -> dict[str, Any]:
    own = {domain: {name: convert(one) for name, one in names.items()} for domain, names in values.items()}
    return {domain: {} for domain in domains} | own


def _value(value: Any) -> Any:
    match value:
        case Version():
            return {"version": str(value).partition("+")[0]}
        case list():
            return [_value(item) for item in value]
        case bool() | str():
            return value
        case int() if -_INT64 <= value < _INT64:
            return value
    raise SelectorError(
        f"a device has the value {str(value)[:40]}, of a type that this version does not support"
    )


def _quantity(text: str) -> Any:
    """Return a protobuf message, because CEL compares messages by their content."""
    return _messages()(amount=str(parse_quantity(text)))


def _semver(text: str, normalize: bool = False) -> dict[str, str]:
    """Return a map, for which CEL chooses other functions than for a message. Raises: ValueError."""
    if normalize:
        parts = [re.sub(r"^0+(?=\d)", "", part) for part in text.removeprefix("v").split(".", 2)]
        text = ".".join([*parts, *["0"] * (3 - len(parts))])
    if _SEMVER.match(text) is None:
        raise ValueError(f"{text!r} is not a semantic version such as 9.0.0")
    return {"version": text.partition("+")[0]}


def _order(version: Mapping[str, str]) -> tuple[Any, ...]:
    match = _SEMVER.match(version["version"])
    if match is None:
        raise ValueError(f"{version['version']!r} is not a semantic version such as 9.0.0")
    numbers = tuple(int(part) for part in match.groups()[:3])
    if match[4] is None:
        return (*numbers, 1)
    parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in match[4].split("."))
    return (*numbers, 0, parts)


def _amount(value: Any) -> Any:
    if isinstance(value, int):
        return value
    return _order(value) if isinstance(value, Mapping) else Fraction(value.amount)


def _integer(value: Any) -> int:
    amount = Fraction(value.amount)
    if amount.denominator != 1 or not -_INT64 <= amount < _INT64:
        raise ValueError("cannot convert value to integer")
    return int(amount)


def _can(read: Callable[..., Any]) -> Callable[..., bool]:
    def can(*arguments: Any) -> bool:
        try:
            read(*arguments)
        except (ValueError, InvalidConfigError):
            return False
        return True

    return can


def _sum(one: Any, other: Any, sign: int = 1) -> Any:
    return _messages()(amount=str(_amount(one) + sign * _amount(other)))


_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    # name (with a dot for methods): implementation, and the types of result and parameters
    "quantity": (_quantity, ("q string",)),
    "isQuantity": (_can(_quantity), ("bool string",)),
    "semver": (_semver, ("s string", "s string bool")),
    "isSemver": (_can(_semver), ("bool string", "bool string bool")),
    ".add": (_sum, ("q q q", "q q int")),
    ".sub": (lambda one, other: _sum(one, other, -1), ("q q q", "q q int")),
    # A function, not a method, despite Kubernetes' documentation.
    "sign": (lambda one: int(_amount(one) > 0) - int(_amount(one) < 0), ("int q",)),
    ".isInteger": (lambda one: _amount(one).denominator == 1, ("bool q",)),
    ".asInteger": (_integer, ("int q",)),
    # Kubernetes compares numbers of different types; the package does so only for dynamic types.
    ".asApproximateFloat": (lambda one: float(_amount(one)), ("dyn q",)),
    ".major": (lambda one: _order(one)[0], ("int s",)),
    ".minor": (lambda one: _order(one)[1], ("int s",)),
    ".patch": (lambda one: _order(one)[2], ("int s",)),
    ".compareTo": (lambda a, b: int(_amount(a) > _amount(b)) - int(_amount(a) < _amount(b)), ("int q q", "int s s")),
    ".isGreaterThan": (lambda one, other: _amount(one) > _amount(other), ("bool q q", "bool s s")),
    ".isLessThan": (lambda one, other: _amount(one) < _amount(other), ("bool q q", "bool s s")),
}  # fmt: skip


@cache
def _environment() -> Any:
    from cel_expr_python import cel

    kind = cel.Type
    kinds = {
        "q": kind("kubernetes.Quantity"), "s": kind.Map(kind.STRING, kind.STRING), "int": kind.INT, "bool": kind.BOOL,
        "dyn": kind.DYN, "string": kind.STRING,
    }  # fmt: skip
    declared = []
    for name, (implementation, signatures) in _FUNCTIONS.items():
        overloads = []
        for signature in signatures:
            result, *parameters = signature.split()
            overloads.append(
                cel.Overload(
                    "_".join((*parameters, name.removeprefix("."))),
                    return_type=kinds[result],
                    parameters=[kinds[part] for part in parameters],
                    is_member=name.startswith("."),
                    impl=implementation,
                )
            )
        declared.append(cel.FunctionDecl(name.removeprefix("."), overloads))
    variables = {
        "device.driver": kind.STRING,
        "device.allowMultipleAllocations": kind.BOOL,
        "device.attributes": kind.Map(kind.STRING, kind.Map(kind.STRING, kind.DYN)),
        "device.capacity": kind.Map(kind.STRING, kind.Map(kind.STRING, kinds["q"])),
    }
    config = cel.NewEnvConfigFromYaml(_LIBRARIES)
    return cel.NewEnv(_pool(), config=config, variables=variables, functions=declared)


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="kubernetes.proto", package="kubernetes", syntax="proto3")
    file.message_type.add(name="Quantity").field.add(name="amount", number=1, type="TYPE_STRING")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def _messages() -> Any:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName("kubernetes.Quantity"))
