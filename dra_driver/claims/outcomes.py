"""The outcome of a call for a claim: whom the driver tells, and the one line that the kubelet gets for a failure."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimRef, Failed
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

Action = Literal["prepare", "unprepare"]


class Observer(Protocol):
    """Hears of each claim's outcome; the rooms above implement it. A method must not raise and must not wait."""

    def in_flight(self, action: Action) -> AbstractContextManager[None]:
        """Within it a call of the kubelet is under way."""

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """A claim is prepared; `record` is None if it has no device of this driver."""

    def unprepared(self, ref: ClaimRef, duration_s: float) -> None:
        """A claim was unprepared, or never was prepared."""

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        """A Prepare has ended, with or without success, which waited for a device that another claim held."""

    def failed(self, action: Action, ref: ClaimRef, duration_s: float, error: Exception, told: str) -> None:
        """A Prepare or Unprepare failed; `told` is the text in the answer to the kubelet."""

    def recovered(self, ref: ClaimRef, why: str) -> None:
        """The driver unprepared a stale claim, for which the kubelet would not have called."""

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        """A stale claim keeps its devices. `text` continues a sentence that begins with the claim: why it is stale,
        which processes compute on its devices, and what to do."""


def failed(observer: Observer, action: Action, ref: ClaimRef, duration_s: float, error: Exception) -> Failed:
    """The claim's entry in the answer: one line. An error that is not a DraDriverError is a bug; the log gets its
    traceback."""
    if isinstance(error, DraDriverError):
        text = " ".join(str(error).split())
    else:
        text = (
            f"internal error ({type(error).__name__}: {' '.join(str(error).split())}); see the driver's log"
        )
        _log.exception("claim_crashed", action=action, claim_uid=ref.uid)
    told = f"{action} claim {ref.namespace}/{ref.name} (UID {ref.uid}): {text}"
    observer.failed(action, ref, duration_s, error, told)
    return Failed(told)
