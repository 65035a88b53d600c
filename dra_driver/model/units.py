"""Kubernetes quantities, as the API server parses and formats them; texts with numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from dra_driver.errors import InvalidConfigError

_QUANTITY = re.compile(
    r"^(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?\d+))?\Z",
    re.ASCII,
)
_LONGEST = 64
_LARGEST_EXPONENT = 64

_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
_FACTORS = {
    **{suffix: Fraction(1024**power) for power, suffix in enumerate(_BINARY)},
    **{suffix: Fraction(1000) ** power for power, suffix in _DECIMAL.items()},
}


@lru_cache(maxsize=1024)  # slices and claims repeat a few quantities
def parse_quantity(text: str) -> Fraction:
    """Return the exact value of `81559Mi`, `1.5G`, `500m` or `2e3`. Raises: InvalidConfigError."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise InvalidConfigError(
            f"{text!r} is not a quantity; expected a number with a suffix such as Mi or G"
        )
    number = Fraction(match["number"])
    if match["exponent"] is None:
        return number * _FACTORS[match["suffix"] or ""]
    exponent = int(match["exponent"])
    if abs(exponent) > _LARGEST_EXPONENT:
        raise InvalidConfigError(f"{text!r} is not a quantity; its exponent is out of range")
    return number * Fraction(10) ** exponent


def quantity_bytes(text: str) -> int:
    """Return an integer, rounded up as the API server does. Raises: InvalidConfigError."""
    value = parse_quantity(text)
    return -(-value.numerator // value.denominator)


def same_quantity(one: object, other: object) -> bool:
    """Whether the values are equal: "1Gi" and "1024Mi"."""
    if one == other:
        return True
    try:
        return parse_quantity(str(one)) == parse_quantity(str(other))
    except InvalidConfigError:
        return False


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return `1 slice` or `2 slices`; `several` is an irregular plural."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def first_of(items: Sequence[str]) -> str:
    """Return `a` for one item, `a +2` for three."""
    return f"{items[0]} +{len(items) - 1}" if len(items) > 1 else "".join(items)


def named(items: Sequence[str], most: int = 4) -> str:
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")


def format_bytes(value: int | Fraction) -> str:
    """Return the canonical binary form: 85520809984 becomes `81559Mi`.

    The API server uses the decimal form for values between -1024 and 1024 and for fractions.
    """
    value = Fraction(value)
    if value.denominator != 1 or abs(value) < 1024:
        return format_decimal(value)
    number, power = value.numerator, 0
    while number % 1024 == 0 and power < len(_BINARY) - 1:
        number //= 1024
        power += 1
    return f"{number}{_BINARY[power]}"


def format_decimal(value: int | Fraction) -> str:
    """Return the canonical decimal form: 0.5 becomes `500m`. Fractions of 1n, the smallest unit, are rounded
    away from zero.
    """
    nanos = Fraction(value) * 10**9
    number = abs(nanos.numerator) // nanos.denominator + (nanos.denominator != 1)
    power = min(_DECIMAL)
    while number and number % 1000 == 0 and power < max(_DECIMAL):
        number //= 1000
        power += 1
    sign = "-" if value < 0 else ""
    return f"{sign}{number}{_DECIMAL[power]}" if number else "0"
