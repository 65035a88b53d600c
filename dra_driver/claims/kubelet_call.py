"""A call of the kubelet: when it began, and until when an answer is of use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dra_driver.errors import RetryableError

CLAIMS_AT_ONCE = 16
"""How many claims of one call are worked on at the same time."""
KUBELET_DEADLINE_S = 45.0
_ANSWER_BEFORE_S = 2.0
"""The kubelet drops an answer that comes after its deadline, and with it the reason."""
_KNOWN_CLAIMS_API_S = 3.0


@dataclass(frozen=True, slots=True)
class KubeletCall:
    """A call of the kubelet. It began at `began_ns` (time.monotonic_ns()); an answer after `deadline`
    (time.monotonic()) comes too late. `has_left` returns whether the kubelet has cancelled the call; None if nobody
    can tell."""

    began_ns: int
    deadline: float
    has_left: Callable[[], bool] | None = None

    @classmethod
    def begin(cls, deadline_s: float | None, has_left: Callable[[], bool] | None = None) -> KubeletCall:
        """A call that begins now; the caller waits `deadline_s` seconds for the answer; None, and more than the
        kubelet ever waits, mean the kubelet's time."""
        seconds = KUBELET_DEADLINE_S if deadline_s is None else min(deadline_s, KUBELET_DEADLINE_S)
        return cls(time.monotonic_ns(), time.monotonic() + seconds - _ANSWER_BEFORE_S, has_left)

    def left(self) -> float:
        """Seconds until an answer comes too late. Raises: RetryableError if it is too late now, or the kubelet
        cancelled the call."""
        if self.has_left is not None and self.has_left():
            raise RetryableError(
                "the kubelet cancelled this call; it calls again if a pod still needs the claim"
            )
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise RetryableError("the kubelet's deadline is over; the kubelet calls again")
        return left

    def left_for_known(self) -> float:
        """Seconds that the API server may take for claims that can be served without it, because a record has them. All
        such claims of the call share this time."""
        spent = (time.monotonic_ns() - self.began_ns) / 1e9
        return max(0.05, min(self.left(), _KNOWN_CLAIMS_API_S - spent))
