"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(check: Callable[[], Any], timeout_s: float = 25.0) -> Any:
    """Polls `check` and returns its first true value. Fails the test after a timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)
    return value
