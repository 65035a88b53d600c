"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(check: Callable[[], Any], timeout_s: float = 25.0) -> Any:
    """The first true value of `check`, which is asked again and again. Fails the test when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)
    return value
