"""Serves the kubelet's calls, each claim of a call independently."""

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
"""Each claim of a call has its own thread, because any may hang."""
KUBELET_DEADLINE_S = 45.0
ANSWER_BEFORE_S = 2.0
"""The kubelet drops answers and errors that come after its deadline."""
_KNOWN_CLAIMS_API_S = 3.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 4.0
_CHECK_EVERY_S = 1.0
_NOT_LET_IN = (
    "another process of gpu-dra-driver works on this node and has not handed over yet; the kubelet retries"
)
_LATE_RIGHTS = frozenset({401, 403})
"""After an installation or a token renewal, the API server may refuse requests for a few seconds."""


@dataclass(frozen=True, slots=True)
class KubeletCall:
    """An answer after `deadline` (time.monotonic()) is too late."""

    began_ns: int
    deadline: float
    is_cancelled: Callable[[], bool] | None = None

    @classmethod
    def begin(cls, deadline_s: float | None, is_cancelled: Callable[[], bool] | None = None) -> KubeletCall:
        """Return a call that begins now. Without `deadline_s`, or if that is longer, the kubelet's own
        timeout counts.
        """
        seconds = KUBELET_DEADLINE_S if deadline_s is None else min(deadline_s, KUBELET_DEADLINE_S)
        return cls(time.monotonic_ns(), time.monotonic() + seconds - ANSWER_BEFORE_S, is_cancelled)

    def left(self) -> float:
        """Return the seconds until an answer is too late.

        Raises: RetryableError if it is too late or the kubelet cancelled the call.
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
        """Return how many seconds the API server may take, in all, for claims that their records can serve."""
        spent = (time.monotonic_ns() - self.began_ns) / 1e9
        return max(0.05, min(self.left(), _KNOWN_CLAIMS_API_S - spent))


@dataclass(slots=True, eq=False)
class PrepareAttempt:
    """One call's work on this driver's part of a claim.

    The fields after `has_ended` belong to `Waiter`: when the attempt first waited, by the waiter's clock; the
    type of the last error; the number of changes that it has seen; by UID, why holders release their devices;
    and the holders whose claims are gone, which are not queried again.
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
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self._calls: Counter[tuple[Action, str]] = Counter()  # keyed by action and claim UID

    @contextmanager
    def calling(self, action: Action, uid: str) -> Iterator[None]:
        """Mark a call as in progress. A Prepare includes the fetch of its claim."""
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
        with self._changed:
            return self._calls[action, uid] > 0

    def wake(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """Wait up to `seconds` until an Unprepare ends, or `wake` is called.

        `seen` is what the last `wait` returned (0 at first), so that no change is missed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout=seconds)
            return self._changes


class Observer(Protocol):
    """Receives the outcome for each claim. Methods must not raise or block."""

    def in_flight(self, action: Action, claims: Sequence[ClaimRef]) -> AbstractContextManager[None]:
        """Track a call while it is in progress."""

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """Without a `record`, the claim has no device of this driver."""

    def unprepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """Without a `record`, the claim had no readable one."""

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        """Report the end of a Prepare that waited for a device."""

    def failed(
        self, action: Action, ref: ClaimRef, duration_s: float, error: Exception, message: str
    ) -> None:
        """Report what the kubelet gets as `message`."""

    def recovered(self, ref: ClaimRef, why: str) -> None:
        """Report that the plugin unprepared a stale claim."""

    def seen(self, ref: ClaimRef, reported: frozenset[ReportedDevice]) -> None:
        """Report the devices in the status of a claim that is not stale."""

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        """Report that processes keep a stale claim's devices. `text` continues a sentence that begins with
        the claim.
        """


def failed(observer: Observer, action: Action, ref: ClaimRef, duration_s: float, error: Exception) -> Failed:
    """Report the error, and return it in one line. Anything but a DraDriverError is a bug, so its traceback
    is logged.
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
    def __init__(self, lookup: ClaimClient, records: RecordStore, driver: str) -> None:
        self._lookup = lookup
        self._records = records
        self._driver = driver

    def allocated(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """Return this driver's part of a claim from the API server; if that fails, a prepared claim's from
        its record.

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
        """Retry until the deadline if the failure may be brief: the kubelet would retry only after a minute
        or more.
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
    """Lets calls in while this process works on the node. Earlier and later calls wait, and shortly before
    their deadline fail with an error that the kubelet retries.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self.is_open = self._is_over = False
        self._inside = 0

    def open(self) -> None:
        with self._turn:
            self.is_open = True
            self._turn.notify_all()

    def close(self, wait_s: float) -> bool:
        """Let no more calls in. Return whether all have ended within `wait_s` seconds."""
        with self._turn:
            self.is_open = False
            return self._turn.wait_for(lambda: not self._inside, wait_s)

    def end(self) -> None:
        """Answer the waiting calls: the kubelet should retry."""
        with self._turn:
            self._is_over = True
            self._turn.notify_all()

    def enter(self, call: KubeletCall) -> bool:
        """Return whether the call was let in. Only then, call `leave` at its end."""
        with self._turn:
            try:
                while not (self.is_open or self._is_over):
                    self._turn.wait(min(call.left(), _CHECK_EVERY_S))
            except RetryableError:
                return False
            self._inside += self.is_open
            return self.is_open

    def leave(self) -> None:
        with self._turn:
            self._inside -= 1
            self._turn.notify_all()


@dataclass(eq=False)
class ClaimService:
    """Serves the claims of a call in parallel: one that fails or waits does not affect the others. Outcomes
    are by UID.
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
        return self._each("prepare", self._prepared, claims, KubeletCall.begin(deadline_s, is_cancelled))

    def unprepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Mapping[str, UnprepareOutcome]:
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
