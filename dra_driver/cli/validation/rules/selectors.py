"""Device selectors, compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from dra_driver.cli.validation.rules.cel import DeviceView, NotJudgedError, program
from dra_driver.cli.validation.rules.classes import standard_selector
from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass

MAX_EXPRESSION_BYTES = 10 * 1024
NOT_INSTALLED = "the Python package cel-expr-python is not installed"

DRIVER_SELECTOR = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")


@dataclass(frozen=True, slots=True)
class Selector:
    """`matches` raises SelectorError."""

    text: str
    matches: Callable[[DeviceView], bool]


@lru_cache(maxsize=2048)
def compiled(text: str) -> Selector:
    """Compile a selector. Without cel-expr-python, only the selectors of gpu-dra-driver's own classes can be
    compiled.

    Raises: InvalidConfigError; NotJudgedError if only the API server can evaluate it.
    """
    if len(text.encode()) > MAX_EXPRESSION_BYTES:
        raise InvalidConfigError(f"is longer than {MAX_EXPRESSION_BYTES} bytes")
    try:
        return Selector(text, program(text))
    except ImportError:
        known = standard_selector(text)
    if known is None:
        raise NotJudgedError(NOT_INSTALLED)
    return Selector(text, known)


def selected_driver(text: str) -> str | None:
    """Return the driver in `device.driver == "…"`, if there is exactly one."""
    found = set(DRIVER_SELECTOR.findall(text))
    return found.pop() if len(found) == 1 else None
