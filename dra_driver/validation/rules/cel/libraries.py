"""Kubernetes' libraries for CEL, under the official implementation: cel-expr-python.

Users have it with `gpu-dra-driver[cel]`. The daemon never imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from dra_driver.validation.rules.cel.values import (
    CelError,
    NotJudgedError,
    Quantity,
    Semver,
    quantity,
    semver,
)

_ORDERS = {"_<_": "less", "_<=_": "less_equals", "_>_": "greater", "_>=_": "greater_equals"}
_LIBRARIES = """
extensions:
- {name: strings, version: 2}
- {name: lists, version: 2}
- name: sets
- {name: optional, version: 2}
- name: bindings
- name: two-var-comprehensions
"""
_WITHOUT_ORDERS = "stdlib:\n  exclude_functions:\n" + "".join(f'  - name: "{name}"\n' for name in _ORDERS)
"""They are declared again, since Kubernetes compares numbers of different types."""

MARK = "not judged: "
_HELD = "in"


_INT64 = 1 << 63


@cache
def _cel() -> Any:
    try:
        from cel_expr_python import cel
    except ImportError:
        raise NotJudgedError("CEL is not installed: pip install 'gpu-dra-driver[cel]'") from None
    return cel


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="kubernetes.proto", package="kubernetes", syntax="proto3")
    for name in ("Quantity", "Semver"):
        file.message_type.add(name=name).field.add(name=_HELD, number=1, type="TYPE_STRING")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def _held(name: str) -> Any:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"kubernetes.{name}"))


def message(value: Any) -> Any:
    """A value as the implementation takes it; equal quantities and versions make equal messages. Raises: CelError for
    what no value of a device is in this version of Kubernetes."""
    if isinstance(value, Quantity):
        return _held("Quantity")(**{_HELD: str(value.amount)})
    if isinstance(value, Semver):
        return _held("Semver")(**{_HELD: value.partition("+")[0]})
    if isinstance(value, list):
        return [message(item) for item in value]
    if isinstance(value, bool | str) or (isinstance(value, int) and -_INT64 <= value < _INT64):
        return value
    raise CelError(f"a device has the value {str(value)[:40]}, of a type that this version does not know")


def plain(value: Any) -> Any:
    """The other way."""
    if isinstance(value, _held("Quantity")):
        return Quantity(Fraction(getattr(value, _HELD)))
    if isinstance(value, _held("Semver")):
        return Semver(getattr(value, _HELD))
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _variables(attribute: Any) -> dict[str, Any]:
    kind = _cel().Type
    return {
        "device.driver": kind.STRING,
        "device.allowMultipleAllocations": kind.BOOL,
        "device.attributes": kind.Map(kind.STRING, kind.Map(kind.STRING, attribute)),
        "device.capacity": kind.Map(kind.STRING, kind.Map(kind.STRING, kind("kubernetes.Quantity"))),
    }


@cache
def compiler() -> Any:
    """Types as Kubernetes declares them; nothing can run here."""
    cel = _cel()
    config = cel.NewEnvConfigFromYaml(_WITHOUT_ORDERS + _LIBRARIES)
    functions = [*_orders(), *_functions(_DECLARED, None)]
    any_type = cel.Type("google.protobuf.Any")
    return cel.NewEnv(_pool(), config=config, variables=_variables(any_type), functions=functions)


@cache
def runtime() -> Any:
    """Where compiled expressions run: values have the types that they have."""
    cel = _cel()
    functions = _functions(_RUNNING, _IMPLEMENTED)
    config = cel.NewEnvConfigFromYaml(_LIBRARIES)
    return cel.NewEnv(_pool(), config=config, variables=_variables(cel.Type.DYN), functions=functions)


def _orders() -> list[Any]:
    cel = _cel()
    kind = cel.Type
    numbers = {"int64": kind.INT, "uint64": kind.UINT, "double": kind.DOUBLE}
    others = {
        "bool": kind.BOOL, "string": kind.STRING, "bytes": kind.BYTES, "timestamp": kind.TIMESTAMP,
        "duration": kind.DURATION,
    }  # fmt: skip
    pairs = [(name, kind, kind) for name, kind in (numbers | others).items()]
    pairs += [(f"{a}_{b}", numbers[a], numbers[b]) for a in numbers for b in numbers if a != b]
    return [
        cel.FunctionDecl(
            sign,
            [
                cel.Overload(f"{name}_{suffix}", return_type=kind.BOOL, parameters=[one, other])
                for suffix, one, other in pairs
            ],
        )
        for sign, name in _ORDERS.items()
    ]


def _functions(table: Mapping[str, tuple[str, ...]], implementations: Mapping[str, Any] | None) -> list[Any]:
    """Functions from `(int, string)` texts: the result first, then the parameters; a dot marks methods."""
    cel = _cel()
    kinds = {
        "q": cel.Type("kubernetes.Quantity"), "s": cel.Type("kubernetes.Semver"), "int": cel.Type.INT,
        "bool": cel.Type.BOOL, "double": cel.Type.DOUBLE, "string": cel.Type.STRING,
        "strings": cel.Type.List(cel.Type.STRING),
    }  # fmt: skip
    declared = []
    for name, signatures in table.items():
        bare = name.removeprefix(".")
        overloads = []
        for signature in signatures:
            result, *parameters = signature.split()
            impl = {} if implementations is None else {"impl": implementations[bare]}
            overloads.append(
                cel.Overload(
                    "_".join((*parameters, bare)),
                    return_type=kinds[result],
                    parameters=[kinds[part] for part in parameters],
                    is_member=name.startswith("."),
                    **impl,
                )
            )
        declared.append(cel.FunctionDecl(bare, overloads))
    return declared


_BOTH: dict[str, tuple[str, ...]] = {
    "quantity": ("q string",),
    "isQuantity": ("bool string",),
    "semver": ("s string", "s string bool"),
    "isSemver": ("bool string", "bool string bool"),
    ".add": ("q q q", "q q int"),
    ".sub": ("q q q", "q q int"),
    "sign": ("int q",),  # a function and no method, whatever the documentation of Kubernetes says
    ".isInteger": ("bool q",),
    ".asInteger": ("int q",),
    ".asApproximateFloat": ("double q",),
    ".major": ("int s",),
    ".minor": ("int s",),
    ".patch": ("int s",),
    ".find": ("string string string",),
    ".findAll": ("strings string string", "strings string string int"),
}
_DECLARED: dict[str, tuple[str, ...]] = _BOTH | {
    ".compareTo": ("int q q", "int s s"),
    ".isGreaterThan": ("bool q q", "bool s s"),
    ".isLessThan": ("bool q q", "bool s s"),
}
_RUNNING: dict[str, tuple[str, ...]] = _BOTH | {
    # Quantities and versions are both messages, which is all that a call is chosen by when it runs.
    ".compareTo": ("int q q",),
    ".isGreaterThan": ("bool q q",),
    ".isLessThan": ("bool q q",),
}


def _compared(one: Any, other: Any) -> int:
    left, right = plain(one), plain(other)
    if type(left) is not type(right):
        raise ValueError("no such overload: a quantity against a version")
    a, b = (left.amount, right.amount) if isinstance(left, Quantity) else (left.key, right.key)
    return int(a > b) - int(a < b)


def _quantity_of(value: Any) -> Any:
    """Raises: ValueError for a version."""
    found = Quantity(Fraction(value)) if isinstance(value, int) else plain(value)
    if not isinstance(found, Quantity):
        raise TypeError("no such overload: a version is no quantity")
    return found.amount


def _integer(value: Any) -> int:
    amount = _quantity_of(value)
    if amount.denominator != 1 or not -(2**63) <= amount < 2**63:
        raise ValueError("cannot convert value to integer")
    return int(amount)


def _part(number: int) -> Callable[[Any], int]:
    def part(value: Any) -> int:
        version = plain(value)
        if not isinstance(version, Semver):
            raise TypeError("no such overload: a quantity is no version")
        return int(version.key[number])

    return part


def _version(text: str, normalize: bool = False) -> Any:
    if normalize:
        raise ValueError(f"{MARK}it lets semver() normalize, which is not tried here")
    return message(semver(text))


def _can(read: Callable[[str], Any]) -> Callable[..., bool]:
    def can(text: str, normalize: bool = False) -> bool:
        if normalize:
            raise ValueError(f"{MARK}it lets isSemver() normalize, which is not tried here")
        try:
            read(text)
        except CelError:
            return False
        return True

    return can


def _found(text: str, pattern: str, most: int = -1) -> list[str]:
    """The matches of a pattern, by RE2: the library of regular expressions gives whole matches without groups."""
    if re.search(r"(?<!\\)\((?!\?)", pattern) or "(?P" in pattern or "(?<" in pattern:
        raise ValueError(f"{MARK}it finds a pattern with groups, which is not tried here")
    result = evaluated("regex.extractAll(of, text)", pattern, text)
    if result.type().name() == "ERROR":
        raise ValueError(str(result.value()))
    found = list(result.plain_value())
    return found if most < 0 else found[:most]


_IMPLEMENTED: Mapping[str, Any] = {
    "quantity": lambda text: message(quantity(text)),
    "isQuantity": _can(quantity),
    "semver": _version,
    "isSemver": _can(semver),
    "add": lambda one, other: message(Quantity(_quantity_of(one) + _quantity_of(other))),
    "sub": lambda one, other: message(Quantity(_quantity_of(one) - _quantity_of(other))),
    "sign": lambda one: int(_quantity_of(one) > 0) - int(_quantity_of(one) < 0),
    "isInteger": lambda one: _quantity_of(one).denominator == 1,
    "asInteger": _integer,
    "asApproximateFloat": lambda one: float(_quantity_of(one)),
    "major": _part(0),
    "minor": _part(1),
    "patch": _part(2),
    "find": lambda text, pattern: (_found(text, pattern) or [""])[0],
    "findAll": _found,
    "compareTo": _compared,
    "isGreaterThan": lambda one, other: _compared(one, other) > 0,
    "isLessThan": lambda one, other: _compared(one, other) < 0,
}


@cache
def _texts() -> Any:
    """An environment for regular expressions and literals by themselves."""
    cel = _cel()
    config = cel.NewEnvConfigFromYaml("extensions:\n- name: regex\n- name: optional\n")
    return cel.NewEnv(config=config, variables={"text": cel.Type.STRING, "of": cel.Type.STRING})


@cache
def _text_expression(expression: str) -> Any:
    return _texts().compile(expression)


def evaluated(expression: str, text: str, of: str = "") -> Any:
    return _text_expression(expression).eval(data={"text": text, "of": of})
