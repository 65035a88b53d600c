"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from playground import PATIENCE_S

__all__ = ["PATIENCE_S", "eventually"]


def eventually(check: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll `check` and return its first true value. Fails the test after a timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s; the last value was {value!r}"
        time.sleep(0.005)
    return value
