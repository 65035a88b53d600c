"""Serves the kubelet's calls, each claim of a call independently: whether this process lets them in, their deadline,
the fetch of their claims, the calls in progress, and the observer of outcomes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal, Protocol, TypeVar

import structlog
from structlog.contextvars import bound_contextvars

from dra_driver.base.backoff import Backoff
from dra_driver.base.deadline import until
from dra_driver.base.threads import run_in_parallel
from dra_driver.claims.rules.plan import our_part
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, DraDriverError, RetryableError
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimRef,
    Failed,
    Prepared,
    PrepareOutcome,
    ReportedDevice,
    UnprepareOutcome,
)
from dra_driver.model.dataclass import dataclass, field, replace
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

T = TypeVar("T")
Action = Literal["prepare", "unprepare"]

CLAIMS_AT_ONCE = 256
"""How many claims of one call are processed at the same time. Each has its own thread, because any of them may hang."""
KUBELET_DEADLINE_S = 45.0
ANSWER_BEFORE_S = 2.0
"""The plugin answers this long before the kubelet's deadline, after which the kubelet drops answers and errors."""
_KNOWN_CLAIMS_API_S = 3.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 4.0
_CHECK_EVERY_S = 1.0
_NOT_LET_IN = (
    "another process of gpu-dra-driver works on this node and has not handed over yet; the kubelet retries"
)
_LATE_RIGHTS = frozenset({401, 403})
"""After an installation or a token renewal, the API server may refuse the plugin's requests for a few seconds."""


@dataclass(frozen=True, slots=True)
class KubeletCall:
    """A kubelet call that began at `began_ns` (time.monotonic_ns()).

    An answer after `deadline` (time.monotonic()) is too late. `is_cancelled` returns whether the kubelet has
    cancelled the call; it is None if cancellation cannot be detected.
    """

    began_ns: int
    deadline: float
    is_cancelled: Callable[[], bool] | None = None

    @classmethod
    def begin(cls, deadline_s: float | None, is_cancelled: Callable[[], bool] | None = None) -> KubeletCall:
        """Return a call that begins now. The caller waits `deadline_s` seconds for the answer.

        None, and values above the kubelet's own timeout, mean the kubelet's timeout.
        """
        seconds = KUBELET_DEADLINE_S if deadline_s is None else min(deadline_s, KUBELET_DEADLINE_S)
        return cls(time.monotonic_ns(), time.monotonic() + seconds - ANSWER_BEFORE_S, is_cancelled)

    def left(self) -> float:
        """Return the seconds until an answer is too late.

        Raises: RetryableError if the deadline has passed or the kubelet cancelled the call.
        """
        if self.is_cancelled is not None and self.is_cancelled():
            raise RetryableError(
                "the kubelet cancelled this call, and retries if a pod still needs the claim"
            )
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise RetryableError("the kubelet's deadline has passed; the kubelet retries")
        return left

    def left_for_known(self) -> float:
        """Return how many seconds the API server may take for claims that can be served from their records.

        All such claims of the call share this time.
        """
        spent = (time.monotonic_ns() - self.began_ns) / 1e9
        return max(0.05, min(self.left(), _KNOWN_CLAIMS_API_S - spent))


@dataclass(slots=True, eq=False)
class PrepareAttempt:
    """One attempt to prepare one claim, passed through all parts of Prepare. `claim` is this driver's part of
    the claim.

    `has_ended` is True once the call is over. The fields after it belong to `Waiter`: when the attempt first waited,
    by the waiter's clock; the type of the last error; and the number of changes that it has seen. `leaving` says, by
    holder UID, why a holder releases its devices; `gone` are the holders whose claims no longer exist, which are not
    queried again.
    """

    ref: ClaimRef
    call: KubeletCall
    claim: AllocatedClaim
    has_ended: bool = False
    waits_since: float | None = None
    waits_after: type[Exception] | None = None
    seen: int = 0
    leaving: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


class CallsUnderWay:
    """Tracks the claims that are being prepared or unprepared. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self._calls: Counter[tuple[Action, str]] = Counter()  # keyed by action and claim UID

    @contextmanager
    def calling(self, action: Action, uid: str) -> Iterator[None]:
        """Mark a Prepare or an Unprepare as in progress. A Prepare includes the fetch of its claim."""
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

    def is_in_progress(self, action: Action, uid: str) -> bool:
        """Whether a call with this action is in progress for the claim."""
        with self._changed:
            return self._calls[action, uid] > 0

    def wake(self) -> None:
        """Wake every `wait`."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """Wait up to `seconds` until an Unprepare succeeds or fails, or `wake` is called.

        Pass what the last `wait` returned as `seen` (0 at first), so that a change in between is not missed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout=seconds)
            return self._changes


class Observer(Protocol):
    """Receives the outcome for each claim. Methods must not raise or block. Implemented in
    `reporting/reporter.py`.
    """

    def in_flight(self, action: Action, claims: Sequence[ClaimRef]) -> AbstractContextManager[None]:
        """Track a call of the kubelet for these claims while it is in progress."""

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """Report a prepared claim. `record` is None if the claim has no device of this driver."""

    def unprepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """Report that a claim was unprepared; `record` is None if it had no readable record."""

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        """Report the end of a Prepare that waited for a device, whether it succeeded or failed."""

    def failed(
        self, action: Action, ref: ClaimRef, duration_s: float, error: Exception, message: str
    ) -> None:
        """Report a failed Prepare or Unprepare. The kubelet gets `message`."""

    def recovered(self, ref: ClaimRef, why: str) -> None:
        """Report that the plugin unprepared a stale claim, which the kubelet no longer unprepares."""

    def seen(self, ref: ClaimRef, reported: frozenset[ReportedDevice]) -> None:
        """Report the devices that the status of a claim names, after the reconciler found the claim not stale."""

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        """Report that a stale claim keeps its devices.

        `text` continues a sentence that begins with the claim: why the claim is stale, which processes compute
        on its devices, and what to do.
        """


def failed(observer: Observer, action: Action, ref: ClaimRef, duration_s: float, error: Exception) -> Failed:
    """Report the error, and return the claim's entry in the answer to the kubelet: one line.

    Any error other than a DraDriverError is a bug, and its traceback is logged.
    """
    if isinstance(error, DraDriverError):
        text = " ".join(str(error).split())
    else:
        text = f"internal error ({type(error).__name__}: {' '.join(str(error).split())}); see the log of gpu-dra-driver"
        _log.exception("claim_crashed", action=action, claim_uid=ref.uid)
    message = f"cannot {action} claim {ref.namespace}/{ref.name} (UID {ref.uid}): {text}"
    observer.failed(action, ref, duration_s, error, message)
    return Failed(message)


class ClaimFetch:
    """Reads the claims of a kubelet call. It holds no lock."""

    def __init__(self, lookup: ClaimClient, records: RecordStore, driver: str) -> None:
        self._lookup = lookup
        self._records = records
        self._driver = driver

    def allocated(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """Return this driver's part of a claim, from the API server or, if that fails, from a prepared claim's record.

        Raises: like `ClaimClient.read`; RetryableError.
        """
        known = self._records.get(ref.uid)
        if known is None or known.phase != "prepared":
            return our_part(self._read(ref, call), self._driver)
        try:
            return our_part(self._lookup.read(ref, call.left_for_known()), self._driver)
        except (ApiUnavailableError, ApiRejectedError) as error:
            # Like no answer at all, a refusal (no permission, version not served) says nothing about the claim.
            _log.warning("claim_read_from_record", claim_uid=ref.uid, reason=str(error))
            return replace(known.claim, reported=None)

    def _read(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """Read the claim like `ClaimClient.read`, but retry until the deadline if the failure may be brief.

        Failures are brief while the API server is busy, starting or failing, or does not know the plugin's permissions
        yet. The kubelet itself would retry only after a minute or more.
        """
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                return self._lookup.read(ref, call.left())
            except (ApiUnavailableError, ApiRejectedError) as error:
                if not _may_end_soon(error):
                    raise
                retry_after_s = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
                pause = backoff.next(retry_after_s)
                if pause >= call.left():
                    raise
            again = time.monotonic() + pause
            while (rest := again - time.monotonic()) > 0:
                time.sleep(min(rest, _CHECK_EVERY_S))
                call.left()  # raises if the kubelet has cancelled the call


def _may_end_soon(error: ApiUnavailableError | ApiRejectedError) -> bool:
    if isinstance(error, ApiRejectedError):
        return error.status in _LATE_RIGHTS
    return error.is_brief or error.retry_after_s is not None


class Admission:
    """Lets the kubelet's calls in while this process works on the node. Calls that come earlier or later wait; if
    their time is nearly over, they fail with an error that the kubelet retries.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self.is_open = self._is_over = False
        self._inside = 0

    def open(self) -> None:
        """Let calls in."""
        with self._turn:
            self.is_open = True
            self._turn.notify_all()

    def close(self, wait_s: float) -> bool:
        """Let no more calls in. Return whether all calls in progress have ended within `wait_s` seconds."""
        with self._turn:
            self.is_open = False
            return self._turn.wait_for(lambda: not self._inside, wait_s)

    def end(self) -> None:
        """Answer the waiting calls: the kubelet should retry."""
        with self._turn:
            self._is_over = True
            self._turn.notify_all()

    def enter(self, call: KubeletCall) -> bool:
        """Wait until the call is let in; return False if it is not. The caller calls `leave` at the end of the call."""
        with self._turn:
            try:
                while not (self.is_open or self._is_over):
                    self._turn.wait(min(call.left(), _CHECK_EVERY_S))
            except RetryableError:
                return False
            self._inside += self.is_open
            return self.is_open

    def leave(self) -> None:
        """End a call that was let in."""
        with self._turn:
            self._inside -= 1
            self._turn.notify_all()


@dataclass(eq=False)
class ClaimService:
    """Serves the kubelet. The claims of a call are processed in parallel: a claim that fails or waits does not affect
    the others.

    `prepare_one` is `Preparer.prepare`, and `unprepare_one` is `Unpreparer.unprepare`.
    """

    admission: Admission
    fetch: ClaimFetch
    prepare_one: Callable[[PrepareAttempt], tuple[Prepared, ClaimRecord | None]]
    unprepare_one: Callable[[ClaimRef, KubeletCall], UnprepareOutcome]
    calls: CallsUnderWay
    observer: Observer

    def prepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Mapping[str, PrepareOutcome]:
        """Return an outcome for each claim, by UID."""
        return self._each("prepare", self._prepared, claims, KubeletCall.begin(deadline_s, is_cancelled))

    def unprepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Mapping[str, UnprepareOutcome]:
        """Return the outcome of `Unpreparer.unprepare` for each claim, by UID."""
        return self._each(
            "unprepare", self.unprepare_one, claims, KubeletCall.begin(deadline_s, is_cancelled)
        )

    def _each(
        self,
        action: Action,
        serve: Callable[[ClaimRef, KubeletCall], T],
        claims: Sequence[ClaimRef],
        call: KubeletCall,
    ) -> dict[str, T | Failed]:
        """Call `serve` for each claim in parallel; returns the results by UID."""
        if not self.admission.enter(call):
            return {ref.uid: Failed(_NOT_LET_IN) for ref in claims}
        admitted = replace(call, began_ns=time.monotonic_ns())

        def one(ref: ClaimRef) -> T:
            with bound_contextvars(claim_uid=ref.uid):
                return serve(ref, admitted)

        try:
            with self.observer.in_flight(action, claims), until(call.deadline):
                outcomes = run_in_parallel([partial(one, ref) for ref in claims], CLAIMS_AT_ONCE)
        finally:
            self.admission.leave()
        return {ref.uid: outcome.result() for ref, outcome in zip(claims, outcomes, strict=True)}

    def _prepared(self, ref: ClaimRef, call: KubeletCall) -> PrepareOutcome:
        started = time.monotonic()
        try:
            with self.calls.calling("prepare", ref.uid):
                attempt = PrepareAttempt(ref, call, self.fetch.allocated(ref, call))
                try:
                    prepared, record = self.prepare_one(attempt)
                finally:
                    if attempt.waits_since is not None:
                        self.observer.waited(ref, time.monotonic() - attempt.waits_since)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            return failed(self.observer, "prepare", ref, time.monotonic() - started, error)
        duration = time.monotonic() - started
        # The record may be older than the claim that was just read.
        self.observer.prepared(ref, duration, record and replace(record, claim=attempt.claim))
        _log.info(
            "claim_prepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[device.device for device in prepared.devices],
            duration_s=round(duration, 4),
        )
        return prepared
