"""How soon the publisher may write again, so that a fight over the slices does not load the API server."""

from __future__ import annotations

import math

from dra_driver.slices.rules.build import Pool

_PROMPT_ANSWERS = 10  # to others who change our slices; a kubelet that starts anew is one
_CALM_S = 60.0
_LONGEST_WAIT_S = 30.0


class WritePacing:
    """When a write may follow the one before. Moments are seconds of a monotonic clock.

    To write a pool again that did not change is to answer somebody who changed the slices. The first answers go out at
    once. Each later one waits twice as long as the one before, until nobody touched the slices for a minute. What
    changed on our side never waits for that.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._answers = 0
        self._wrote = -math.inf
        self._needed: float | None = None

    @property
    def contested(self) -> bool:
        """Whether answers are held back."""
        return self._answers >= _PROMPT_ANSWERS

    def lately(self, now: float) -> bool:
        """Whether the last write is so fresh that more may be under way."""
        return now - self._wrote < _CALM_S

    def not_needed(self) -> None:
        """The slices are as they should be."""
        self._needed = None

    def wait_s(self, pool: Pool, now: float) -> float:
        """How long the write that is needed now still has to wait."""
        if self._needed is None:
            self._needed = now
            if not self.lately(now):
                self._answers = 0
        if pool != self._pool or not self.contested:
            return 0.0
        delay = min(2.0 ** min(self._answers - _PROMPT_ANSWERS, 10), _LONGEST_WAIT_S)
        return max(0.0, self._needed + delay - now)

    def wrote(self, pool: Pool, now: float) -> None:
        """The pool was written."""
        if pool == self._pool:
            self._answers += 1
        self._pool, self._wrote, self._needed = pool, now, None
