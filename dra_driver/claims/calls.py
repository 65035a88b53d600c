"""A call of the kubelet: until when an answer is of use, the claims that it names, which calls are under way, and who
hears of the outcome. The API server says what a claim is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.claims.rules.plan import our_part
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, DraDriverError, RetryableError
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import AllocatedClaim, ClaimRef, Failed, ReportedDevice
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

Action = Literal["prepare", "unprepare"]

CLAIMS_AT_ONCE = 256
"""How many claims of one call are worked on at the same time: each has a thread, since any number of them may hang."""
KUBELET_DEADLINE_S = 45.0
_ANSWER_BEFORE_S = 2.0
"""The kubelet drops an answer that comes after its deadline, and with it the reason."""
_KNOWN_CLAIMS_API_S = 3.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 4.0
_LOOK_EVERY_S = 1.0
_LATE_RIGHTS = frozenset({401, 403})
"""After an installation or a renewal of tokens, rights may arrive some seconds after the plugin."""


@dataclass(frozen=True, slots=True)
class KubeletCall:
    """A call of the kubelet. It began at `began_ns` (time.monotonic_ns()); an answer after `deadline`
    (time.monotonic()) comes too late. `is_cancelled` returns whether the kubelet has cancelled the call; None if nobody
    can tell."""

    began_ns: int
    deadline: float
    is_cancelled: Callable[[], bool] | None = None

    @classmethod
    def begin(cls, deadline_s: float | None, is_cancelled: Callable[[], bool] | None = None) -> KubeletCall:
        """A call that begins now; the caller waits `deadline_s` seconds for the answer; None, and more than the
        kubelet ever waits, mean the kubelet's time."""
        seconds = KUBELET_DEADLINE_S if deadline_s is None else min(deadline_s, KUBELET_DEADLINE_S)
        return cls(time.monotonic_ns(), time.monotonic() + seconds - _ANSWER_BEFORE_S, is_cancelled)

    def left(self) -> float:
        """Seconds until an answer comes too late. Raises: RetryableError if it is too late now, or the kubelet
        cancelled the call."""
        if self.is_cancelled is not None and self.is_cancelled():
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


class CallsUnderWay:
    """Which claims are being prepared and unprepared in this process. For many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self._calls: Counter[tuple[Action, str]] = Counter()  # with the claim's UID

    @contextmanager
    def calling(self, action: Action, uid: str) -> Iterator[None]:
        """Within it the claim is being prepared, from the fetch on, or unprepared."""
        with self._changed:
            self._calls[action, uid] += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[action, uid] -= 1
                if not self._calls[action, uid]:
                    del self._calls[action, uid]
            if action == "unprepare":
                self.wake()

    def is_called(self, action: Action, uid: str) -> bool:
        """Whether such a call is under way for the claim."""
        with self._changed:
            return self._calls[action, uid] > 0

    def wake(self) -> None:
        """End every `wait`."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until a claim was unprepared or `wake` was called, but at most `seconds`. `seen` is what the last `wait`
        returned, so that nothing in between is missed; 0 at first."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout=seconds)
            return self._changes


class Observer(Protocol):
    """Gets each claim's outcome. Methods must not raise or wait. `reporting/reporter.py` implements it."""

    def in_flight(self, action: Action, claims: Sequence[ClaimRef]) -> AbstractContextManager[None]:
        """Within it a call of the kubelet for these claims is under way."""

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """A claim is prepared; `record` is None if it has no device of this driver."""

    def unprepared(self, ref: ClaimRef, duration_s: float) -> None:
        """A claim was unprepared, or never was prepared."""

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        """A Prepare has ended, with or without success, which waited for a device."""

    def failed(
        self, action: Action, ref: ClaimRef, duration_s: float, error: Exception, message: str
    ) -> None:
        """A Prepare or Unprepare failed; the kubelet gets `message` as the answer."""

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
    message = f"{action} claim {ref.namespace}/{ref.name} (UID {ref.uid}): {text}"
    observer.failed(action, ref, duration_s, error, message)
    return Failed(message)


class ClaimFetch:
    """Reads the claims of a call. It holds no lock."""

    def __init__(self, lookup: ClaimClient, records: RecordStore, driver: str) -> None:
        self._lookup = lookup
        self._records = records
        self._driver = driver

    def allocated(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """Our part of a claim of the call: from the API server, or from the record if the API server does not tell.

        Raises: as `ClaimClient.read`; RetryableError.
        """
        known = self._records.get(ref.uid)
        if known is None or known.phase != "prepared":
            return our_part(self._read(ref, call), self._driver)
        try:
            return our_part(self._lookup.read(ref, call.left_for_known()), self._driver)
        except (ApiUnavailableError, ApiRejectedError) as error:
            # A refusal (no permission, version not served) says as little about the claim as no answer at all.
            _log.warning("claim_read_from_record", claim_uid=ref.uid, reason=str(error))
            return replace(known.claim, reported=None)

    def _read(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """As `ClaimClient.read`. If the API server is busy, starts, fails, or does not know our rights, the plugin
        retries for as long as the kubelet waits: the kubelet would call again only after a minute or more."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                return self._lookup.read(ref, call.left())
            except (ApiUnavailableError, ApiRejectedError) as error:
                if not _may_end_soon(error):
                    raise
                asked_s = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
                pause = backoff.next(asked_s)
                if pause >= call.left():
                    raise
            again = time.monotonic() + pause
            while (rest := again - time.monotonic()) > 0:
                time.sleep(min(rest, _LOOK_EVERY_S))
                call.left()  # raises if the kubelet has cancelled the call meanwhile


def _may_end_soon(error: ApiUnavailableError | ApiRejectedError) -> bool:
    if isinstance(error, ApiRejectedError):
        return error.status in _LATE_RIGHTS
    return error.is_brief or error.retry_after_s is not None
