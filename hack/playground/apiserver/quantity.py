"""Kubernetes quantities, as far as validation compares them."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

_PATTERN = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?\d+))?")
_BINARY = {unit: Fraction(1024) ** (i + 1) for i, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}
_DECIMAL: dict[str, Fraction] = {
    unit: Fraction(1000) ** (i - 3)
    for i, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"))
}


def parse_quantity(value: Any) -> Fraction | None:
    """The exact value; None if it is not a quantity."""
    return _parsed(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Fraction | None:
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    number, binary, decimal, exponent = match.groups()
    if binary:
        return Fraction(number) * _BINARY[binary]
    if exponent:
        return Fraction(f"{number}e{exponent}")
    return Fraction(number) * _DECIMAL[decimal or ""]
