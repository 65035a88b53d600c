"""How long the kubelet still waits for the call that this thread works on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dra_driver.errors import RetryableError

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """What is done inside has to end by `deadline` (time.monotonic())."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is done inside has to end within `seconds`, and before the deadline around it."""
    deadline, around = time.monotonic() + seconds, _deadline.get()
    with until(deadline if around is None else min(deadline, around)):
        yield


def time_left(most_s: float) -> float:
    """Seconds until the deadline, `most_s` at most, and not below 0."""
    deadline = _deadline.get()
    return most_s if deadline is None else max(0.0, min(most_s, deadline - time.monotonic()))


def seconds_for(what: str, at_most: float) -> float:
    """How long `what` may take: `at_most`, or less if the call has to be answered before.

    Raises: RetryableError if there is no time left at all.
    """
    deadline = _deadline.get()
    if deadline is None:
        return at_most
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryableError(f"no time is left to {what} before the call must be answered; it is tried again")
    return min(at_most, left)
