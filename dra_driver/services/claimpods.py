"""Which pods use a claim: those that the API server had it reserved for when it was read last, for whatever reason.

The kubelet has a claim prepared once, for its first pod; others that share it come and go without a call. So the
record, which says what Prepare saw, is written anew where the reconciler sees something else. All of that is for people
only: nothing is decided by it, and records are equal without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Protocol

from dra_driver.errors import DraDriverError
from dra_driver.model.claim import Pods
from dra_driver.model.record import ClaimRecord

_MOST_REMEMBERED = 512
_LOCK_WAIT_S = 1.0


class ClaimPods:
    """What was read last of each claim, in memory; for many threads. Of the oldest ones the records must do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[str, Pods] = {}  # by claim UID

    def note(self, uid: str, pods: Pods) -> None:
        """The API server said this now; None says nothing."""
        if pods is None:
            return
        with self._lock:
            self._noted.pop(uid, None)
            self._noted[uid] = pods
            while len(self._noted) > _MOST_REMEMBERED:
                del self._noted[next(iter(self._noted))]

    def of(self, record: ClaimRecord) -> Pods:
        """The pods of a claim, None if they are not known."""
        with self._lock:
            noted = self._noted.get(record.ref.uid)
        return record.claim.pods if noted is None else noted


class Records(Protocol):
    """The claim records."""

    def get(self, uid: str) -> ClaimRecord | None:
        """One claim's record."""

    def save(self, record: ClaimRecord, *, durable: bool = True, whole: bool = True) -> None:
        """Write; a power cut leaves this version or the one before if only `whole`."""


class ClaimTurn(Protocol):
    """The right to work on one claim."""

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded after the moment, or may have."""


ClaimLock = Callable[[str, float], AbstractContextManager[ClaimTurn]]
"""Holds the lock of the claim with the UID; RetryableError if it cannot be had within so many seconds."""


class RecordedPods:
    """Writes pods into records of claims that are prepared."""

    def __init__(self, records: Records, hold: ClaimLock) -> None:
        self._records = records
        self._hold = hold

    def keep(self, seen: ClaimRecord, pods: Pods, looked_ns: int) -> None:
        """Have the claim's record say what the API server said at `looked_ns` (time.monotonic_ns()).

        Nothing is written if that was not read or `seen`, which is the record as it was before the look, says the same;
        if there is no record any more; or if the claim was prepared after the look, since Prepare looked too.
        """
        if pods is None or seen.claim.pods == pods:
            return
        # Who cannot write now is asked again with the next look, and what is in memory is right until then.
        with suppress(DraDriverError), self._hold(seen.ref.uid, _LOCK_WAIT_S) as turn:
            record = self._records.get(seen.ref.uid)
            if record is None or turn.was_prepared_since(looked_ns):
                return
            if record.claim.pods == pods:  # by the other instance of a rolling update
                return
            # Not durable: who loses the last version in a power cut finds the one before, which names the same steps.
            self._records.save(replace(record, claim=replace(record.claim, pods=pods)), durable=False)
