"""A call of the kubelet: when it began, until when an answer is of use, who hears of the outcome, and the one line that
the kubelet gets for a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog

from dra_driver.errors import DraDriverError, RetryableError
from dra_driver.model.claim import ClaimRef, Failed, ReportedDevice
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

Action = Literal["prepare", "unprepare"]

CLAIMS_AT_ONCE = 256
"""How many claims of one call are worked on at the same time: each has a thread, since any number of them may hang."""
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


class Observer(Protocol):
    """Hears of each claim's outcome; the rooms above implement it. A method must not raise and must not wait."""

    def in_flight(self, action: Action, claims: Sequence[ClaimRef]) -> AbstractContextManager[None]:
        """Within it a call of the kubelet for these claims is under way."""

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """A claim is prepared; `record` is None if it has no device of this driver."""

    def unprepared(self, ref: ClaimRef, duration_s: float) -> None:
        """A claim was unprepared, or never was prepared."""

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        """A Prepare has ended, with or without success, which waited for a device."""

    def failed(self, action: Action, ref: ClaimRef, duration_s: float, error: Exception, told: str) -> None:
        """A Prepare or Unprepare failed; `told` is the text in the answer to the kubelet."""

    def recovered(self, ref: ClaimRef, why: str) -> None:
        """The driver unprepared a stale claim, for which the kubelet would not have called."""

    def seen(self, ref: ClaimRef, reported: frozenset[ReportedDevice]) -> None:
        """The reconciler has read a claim that is not stale, and its status names these devices."""

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        """A stale claim keeps its devices. `text` continues a sentence that begins with the claim: why it is stale,
        which processes compute on its devices, and what to do."""


def failed(observer: Observer, action: Action, ref: ClaimRef, duration_s: float, error: Exception) -> Failed:
    """The claim's entry in the answer: one line. An error that is not a DraDriverError is a bug; the log gets its
    traceback."""
    if isinstance(error, DraDriverError):
        text = " ".join(str(error).split())
    else:
        text = f"internal error ({type(error).__name__}: {' '.join(str(error).split())}); see the log of gpu-dra-driver"
        _log.exception("claim_crashed", action=action, claim_uid=ref.uid)
    told = f"{action} claim {ref.namespace}/{ref.name} (UID {ref.uid}): {text}"
    observer.failed(action, ref, duration_s, error, told)
    return Failed(told)
