"""The deadline of the kubelet call that this thread handles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dra_driver.errors import RetryableError

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Set the deadline (time.monotonic()) for the work inside the block."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the work inside the block to `seconds`, or less if an outer deadline is earlier."""
    deadline, around = time.monotonic() + seconds, _deadline.get()
    with until(deadline if around is None else min(deadline, around)):
        yield


def time_left(max_s: float) -> float:
    deadline = _deadline.get()
    return max_s if deadline is None else max(0.0, min(max_s, deadline - time.monotonic()))


def seconds_for(what: str, max_s: float) -> float:
    """Return how many seconds `what` may take, at most `max_s`. Raises: RetryableError after the deadline."""
    deadline = _deadline.get()
    if deadline is None:
        return max_s
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryableError(
            f"gpu-dra-driver ran out of time to {what} before the call's deadline; the call will be retried"
        )
    return min(max_s, left)
