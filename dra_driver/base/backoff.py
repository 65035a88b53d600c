"""Waits between tries that fail: each twice as long as the one before, and spread by chance."""

from __future__ import annotations

import math
import random

_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security


class Backoff:
    """The waits of one kind of try, in seconds: `first_s`, then twice as long each time, `most_s` at most.

    Each is multiplied by a factor of the range `spread`. For the use of one thread.
    """

    def __init__(self, first_s: float, most_s: float, spread: tuple[float, float] = (0.8, 1.2)) -> None:
        self._first_s, self._most_s, self._spread = first_s, most_s, spread
        self._step_s = first_s

    def step(self) -> float:
        """The next wait, not spread."""
        step, self._step_s = self._step_s, min(self._step_s * 2, self._most_s)
        return step

    def next(self, asked_s: float | None = None) -> float:
        """The next wait, and no shorter than the API server asks for with Retry-After.

        The time that it asks for is spread too, or all nodes that it asked would be back at once.
        """
        wait_s = self.step() * _jitter.uniform(*self._spread)
        return max(wait_s, (asked_s or 0.0) * _jitter.uniform(1.0, 1.2))

    def reset(self, lasted_s: float = math.inf) -> None:
        """A try has succeeded: begin with the first wait again.

        Not if what was tried, such as a watch, lasted shorter than the longest wait: what is over so soon each time
        would be tried again and again after the first wait.
        """
        if lasted_s >= self._most_s:
            self._step_s = self._first_s
