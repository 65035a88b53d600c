"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from playground import PATIENCE_S

__all__ = ["PATIENCE_S", "eventually"]


def eventually(check: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll `check`, less often the longer that takes, and return its first true value. Fails the test after a
    timeout."""
    began = time.monotonic()
    while not (value := check()):
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s:g} s; the last value was {value!r}"
        time.sleep(min(0.005 + waited_s / 20, 0.1))
    return value
