"""Kubernetes quantities, as far as validation compares them."""

from __future__ import annotations

import functools
from fractions import Fraction

from dra_driver.errors import InvalidConfigError
from dra_driver.model import units


@functools.lru_cache(maxsize=4096, typed=True)
def parse_quantity(value: object) -> Fraction | None:
    """The exact value; None if it is not a quantity."""
    try:
        return units.parse_quantity(str(value))
    except InvalidConfigError:
        return None
