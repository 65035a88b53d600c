"""Values of CEL that Python has no type for, and what an evaluation can end in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import format_bytes, format_decimal, parse_quantity

_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?\Z",
    re.ASCII,
)


class CelError(Exception):
    """An evaluation that ends in an error: a key that is missing, values that do not go together."""


class NotJudgedError(Exception):
    """Nobody here can say what Kubernetes would make of an expression: no verdict is better than a wrong one."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity; equal by value, shown as it was written."""

    amount: Fraction
    text: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantity) and self.amount == other.amount

    def __hash__(self) -> int:
        return hash(self.amount)

    def __str__(self) -> str:
        if self.text:
            return self.text
        binary = self.amount.denominator == 1 and self.amount % 1024 == 0
        return format_bytes(self.amount) if binary else format_decimal(self.amount)


class Semver(str):
    """A semantic version, kept as its text; build metadata does not count."""

    __slots__ = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What versions are ordered by."""
        match = _SEMVER.match(self)
        if match is None:
            raise CelError(f"{str(self)!r} is no semantic version")
        numbers = tuple(int(part) for part in match.groups()[:3])
        if match[4] is None:
            return (*numbers, 1)
        parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in match[4].split("."))
        return (*numbers, 0, parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Semver) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def quantity(text: Any) -> Quantity:
    """Raises: CelError."""
    try:
        return Quantity(parse_quantity(str(text)), str(text))
    except InvalidConfigError as error:
        raise CelError(str(error)) from error


def semver(text: Any) -> Semver:
    """Raises: CelError."""
    match = _SEMVER.match(text) if isinstance(text, str) else None
    if match is None or any(
        part.isdigit() and part != "0" and part.startswith("0") for part in (match[4] or "").split(".")
    ):
        raise CelError(f"{text!r} is no semantic version such as 9.0.0")
    return Semver(text)


def type_name(value: Any) -> str:
    """What to call the type of a value."""
    match value:
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "double"
        case Semver():
            return "version"
        case str():
            return "string"
        case Quantity():
            return "quantity"
        case list():
            return "list"
        case dict():
            return "map"
        case None:
            return "null"
        case _:
            return type(value).__name__
