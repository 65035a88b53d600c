"""How often something is tried: waits that grow between tries that fail, and a limit on how often it happens at all."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

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


_ROUNDING = 1e-9


class TokenBucket:
    """`burst` tokens at once, then `qps` a second on average.

    `acquire` takes a token and sleeps until it is due; safe for many threads. A caller that does not want to sleep asks
    `ready_at` and then calls `take`. Both get a moment of a monotonic clock in seconds; their callers lock.
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

    def acquire(self, most_s: float = math.inf) -> float:
        """Wait for a token; the seconds waited. Threads are served in the order of their arrival. Raises: TimeoutError
        at once if that would take longer than `most_s`."""
        with self._lock:
            now = self._clock()
            if self.ready_at(now) - now > most_s:
                raise TimeoutError(
                    f"gpu-dra-driver's own limit of {self._qps:g} requests a second is used up; raise kubeAPIQPS"
                )
            wait_s = self.take(now)
        if wait_s:
            self._sleep(wait_s)
        return wait_s

    def ready_at(self, now: float) -> float:
        """When the next token is there."""
        tokens = self._tokens_at(now)
        return now if tokens >= 1 - _ROUNDING else now + (1 - tokens) / self._qps

    def take(self, now: float) -> float:
        """Take a token, in advance if there is none; in how many seconds it is due."""
        self._tokens, self._filled_at = self._tokens_at(now) - 1, now
        return max(0.0, -self._tokens / self._qps)

    def _tokens_at(self, now: float) -> float:
        passed = 0.0 if self._filled_at is None else max(0.0, now - self._filled_at)
        return min(self._burst, self._tokens + passed * self._qps)
