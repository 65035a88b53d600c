"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Time in seconds that passes only in pauses."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
