"""A client-side limit on requests, so that a bug of ours cannot load the API server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """`burst` requests at once, then `qps` a second on average; safe for many threads.

    Waiters are served in order of arrival: each takes its token in advance and sleeps until it is due.
    """

    def __init__(
        self,
        qps: float,
        burst: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if qps <= 0 or burst < 1:
            raise ValueError("qps must be positive and burst at least 1")
        self._qps, self._burst = qps, burst
        self._clock, self._sleep = clock, sleep
        self._tokens, self._filled_at = float(burst), clock()
        self._lock = threading.Lock()

    def acquire(self) -> float:
        """Wait until a request may be sent; the seconds waited."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._qps)
            self._filled_at = now
            self._tokens -= 1
            wait_s = max(0.0, -self._tokens / self._qps)
        if wait_s:
            self._sleep(wait_s)
        return wait_s
