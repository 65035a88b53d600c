"""One call of the kubelet: how much time it has, and the claims that it names as the API server knows them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog

from dra_driver.core.planning import our_part
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, DraDriverError, RetryableError
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_KUBELET_DEADLINE_S = 45.0
_ANSWER_BEFORE_S = 2.0
"""The kubelet drops an answer that comes after its deadline, and with it the reason."""
_KNOWN_CLAIMS_API_S = 3.0
_READERS = 8

Action = Literal["prepare", "unprepare"]


class ClaimReader(Protocol):
    """Reads claims from the API server."""

    def read(self, ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        """The allocated claim. Raises: ClaimRefusedError if it is gone, replaced or not allocated;
        ApiUnavailableError."""


class Records(Protocol):
    """The claim records."""

    def get(self, uid: str) -> ClaimRecord | None:
        """One claim's record."""

    def all(self) -> Mapping[str, ClaimRecord]:
        """Every record by claim UID."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kubelet: when it began and when an answer would come too late (time.monotonic())."""

    began_ns: int
    deadline: float

    @classmethod
    def begin(cls, deadline_s: float | None) -> Call:
        """A call that begins now; the kubelet waits `deadline_s` seconds, as long as it usually does if None."""
        seconds = deadline_s if deadline_s is not None else _KUBELET_DEADLINE_S
        return cls(time.monotonic_ns(), time.monotonic() + seconds - _ANSWER_BEFORE_S)

    def left(self) -> float:
        """Seconds until it is too late. Raises: RetryableError if it is."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise RetryableError("the kubelet's deadline is over; it will ask again")
        return left

    def left_for_known(self) -> float:
        """Seconds that the API server may take over claims which can do without; shared by all of the call."""
        spent = (time.monotonic_ns() - self.began_ns) / 1e9
        return max(0.05, min(self.left(), _KNOWN_CLAIMS_API_S - spent))


@dataclass(frozen=True, slots=True)
class Read:
    """A claim, or why it could not be read; and how long that took."""

    outcome: AllocatedClaim | Exception
    duration_s: float

    def claim_or_raise(self) -> AllocatedClaim:
        """Our part of the claim. Raises: what kept it from being read."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class CalledClaims:
    """Reads the claims that a call names, without any lock."""

    def __init__(self, claims: ClaimReader, records: Records, driver: str) -> None:
        self._claims = claims
        self._records = records
        self._driver = driver

    def read_all(self, refs: Sequence[ClaimRef], call: Call) -> dict[str, Read]:
        """Every claim, read at the same time: an API server that hangs costs one wait, not one a claim."""
        if len(refs) == 1:
            return {refs[0].uid: self._read(refs[0], call)}
        with ThreadPoolExecutor(_READERS, thread_name_prefix="read-claims") as pool:
            # Each in a context of its own, so that its log events bear the request's ID.
            read = [pool.submit(copy_context().run, self._read, ref, call) for ref in refs]
            return {ref.uid: one.result() for ref, one in zip(refs, read, strict=True)}

    def _read(self, ref: ClaimRef, call: Call) -> Read:
        started = time.monotonic()
        try:
            return Read(self._allocated(ref, call), time.monotonic() - started)
        except Exception as error:  # noqa: BLE001  told as this claim's error
            return Read(error, time.monotonic() - started)

    def _allocated(self, ref: ClaimRef, call: Call) -> AllocatedClaim:
        """Our part of the claim: from the API server, or from the record if it does not answer."""
        known = self._records.get(ref.uid)
        is_prepared = known is not None and known.phase == "prepared"
        try:
            timeout = call.left_for_known() if is_prepared else call.left()
            return our_part(self._claims.read(ref, timeout), self._driver)
        except (ApiUnavailableError, ApiRejectedError) as error:
            # A refusal (no permission, no such version served) says as little of the claim as silence.
            if known is None or not is_prepared:
                raise
            _log.warning("claim_read_from_record", claim_uid=ref.uid, reason=str(error))
            return known.claim


def told_as(action: Action, ref: ClaimRef, error: Exception) -> str:
    """The error as the claim's entry: one line. What is not one of ours is a bug and goes to the log whole."""
    if isinstance(error, DraDriverError):
        text = " ".join(str(error).split())
    else:
        text = (
            f"internal error ({type(error).__name__}: {' '.join(str(error).split())}); see the driver's log"
        )
        _log.exception("claim_crashed", action=action, claim_uid=ref.uid)
    return f"{action} claim {ref.namespace}/{ref.name} (UID {ref.uid}): {text}"
