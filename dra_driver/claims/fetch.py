"""Reads the claims that a call names from the API server, and notes which pods use them.

The kubelet calls Prepare once, for the first pod of a claim. Other pods that share the claim come and go without a
call. So the reconciler writes the pods into the claim's record again where they have changed since Prepare. The pods
are information for people, and two records that differ in their pods only are equal. The plugin decides one thing by
them: whether a stale claim that another one waits for needs a grace time.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.rules.plan import our_part
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, DraDriverError
from dra_driver.journal.locks import ClaimLocks
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import AllocatedClaim, ClaimRef, Pods
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 4.0
_LOOK_EVERY_S = 1.0
_LATE_RIGHTS = frozenset({401, 403})
"""After an installation or a renewal of tokens, rights may arrive some seconds after the plugin."""


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
        backoff = Backoff(_FIRST_PAUSE_S, _MOST_PAUSE_S)
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


_MOST_REMEMBERED = 512
_LOCK_WAIT_S = 1.0


class ClaimPods:
    """The pods of each claim as last read, in memory; for many threads. When there are too many claims, the oldest
    entries are dropped, and `of` takes the pods from the record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[str, Pods] = {}  # by claim UID

    def note(self, uid: str, pods: Pods) -> None:
        """The API server has just answered with these pods; None changes nothing."""
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

    def known_pods(self, record: ClaimRecord) -> frozenset[str]:
        """UIDs of all pods that the claim is known to have been for."""
        return frozenset(pod.uid for pods in (record.claim.pods, self.of(record)) for pod in pods or ())


class RecordedPods:
    """Writes pods into records of claims that are prepared."""

    def __init__(self, records: RecordStore, claim_locks: ClaimLocks) -> None:
        self._records = records
        self._claim_locks = claim_locks

    def keep(self, seen: ClaimRecord, pods: Pods) -> None:
        """Write the pods, as just read from the API server, into the claim's record.

        `seen` is the record before the API server was asked. Nothing is written if the pods are not known, if `seen`
        has the same pods, if there is no record any more, or if another call has written other pods since.
        """
        if pods is None or seen.claim.pods == pods:
            return
        # If this write fails, the next look tries again; until then the pods in memory are right.
        with suppress(DraDriverError), self._claim_locks.hold(seen.ref.uid, _LOCK_WAIT_S):
            record = self._records.get(seen.ref.uid)
            if record is None or record.claim.pods != seen.claim.pods:
                return
            # Not durable: a power cut may bring back the version before this one, which names the same steps.
            self._records.save(replace(record, claim=replace(record.claim, pods=pods)), durable=False)
