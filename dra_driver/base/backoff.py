from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

_jitter = random.Random()  # noqa: S311  for spreading load, not for security


class Backoff:
    """Delays in seconds: `first_s`, doubled after each failure, up to `max_s`, times a random factor from `spread`.

    Not thread-safe.
    """

    def __init__(self, first_s: float, max_s: float, spread: tuple[float, float] = (0.8, 1.2)) -> None:
        self._first_s, self._max_s, self._spread = first_s, max_s, spread
        self._step_s = first_s

    def step(self) -> float:
        step, self._step_s = self._step_s, min(self._step_s * 2, self._max_s)
        return step

    def next(self, retry_after_s: float | None = None) -> float:
        """Return the next delay, at least the API server's Retry-After. Both are random, so that nodes do not return
        together.
        """
        wait_s = self.step() * _jitter.uniform(*self._spread)
        return max(wait_s, (retry_after_s or 0.0) * _jitter.uniform(1.0, 1.2))

    def reset(self, lasted_s: float = math.inf) -> None:
        """Start again at the first delay, after a success.

        A success shorter than `max_s` changes nothing: a watch that always breaks at once must be reopened ever more
        slowly.
        """
        if lasted_s >= self._max_s:
            self._step_s = self._first_s


_ROUNDING = 1e-9


class TokenBucket:
    """A rate limiter: `burst` tokens at once, then `qps` tokens per second on average.

    `acquire` is thread-safe and sleeps. A caller that must not sleep holds its own lock and calls `ready_at` and then
    `take`.
    """

    def __init__(
        self,
        qps: float,
        burst: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._qps, self._burst = qps, float(burst)
        self._clock, self._sleep = clock, sleep
        self._tokens = self._burst
        self._filled_at: float | None = None
        self._lock = threading.Lock()

    def acquire(self, max_s: float = math.inf) -> float:
        """Wait for a token, in order of arrival; returns the seconds waited.

        Raises: TimeoutError at once if the wait would exceed `max_s`.
        """
        with self._lock:
            now = self._clock()
            if self.ready_at(now) - now > max_s:
                raise TimeoutError(
                    f"gpu-dra-driver reached its own limit of API requests, kubeAPIQPS={self._qps:g}; raise it"
                )
            wait_s = self.take(now)
        if wait_s:
            self._sleep(wait_s)
        return wait_s

    def ready_at(self, now: float) -> float:
        tokens = self._tokens_at(now)
        return now if tokens >= 1 - _ROUNDING else now + (1 - tokens) / self._qps

    def take(self, now: float) -> float:
        """Take a token, in advance if none is left; returns the seconds until it is due."""
        self._tokens, self._filled_at = self._tokens_at(now) - 1, now
        return max(0.0, -self._tokens / self._qps)

    def _tokens_at(self, now: float) -> float:
        passed = 0.0 if self._filled_at is None else max(0.0, now - self._filled_at)
        return min(self._burst, self._tokens + passed * self._qps)
