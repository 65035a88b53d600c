"""A part of the daemon that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Part(NamedTuple):
    """The daemon starts its parts in the order of its list, and stops them in the reverse order. A function is None if
    there is nothing to do."""

    name: str
    start: Callable[[], object] | None = None
    stop: Callable[[], object] | None = None
