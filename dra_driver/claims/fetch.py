"""Reads the claims that a call names from the API server."""

from __future__ import annotations

import time

import structlog

from dra_driver.claims.claim_pods import ClaimPods
from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.rules.plan import our_part
from dra_driver.concurrency.backoff import Backoff
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, ClaimRefusedError
from dra_driver.journal.records import RecordStore
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef

_log = structlog.get_logger(__name__)

_NOT_FOUND = 404
_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 4.0
_LOOK_EVERY_S = 1.0


class ClaimLookup:
    """Claims in the API server. Each read also notes the pods of the claim."""

    def __init__(self, client: ClaimClient, claim_pods: ClaimPods) -> None:
        self._client = client
        self._claim_pods = claim_pods

    def read(self, ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        """The claim with the allocation of all drivers.

        Raises: ClaimRefusedError if the claim is deleted, replaced or not allocated; ApiUnavailableError,
        ApiRejectedError if the API server does not tell.
        """
        try:
            claim = self._client.get_allocated(ref, timeout_s=timeout_s)
        except PathNotFoundError:
            raise
        except ApiRejectedError as error:
            if error.status == _NOT_FOUND:
                raise ClaimRefusedError(
                    f"claim {ref.namespace}/{ref.name} does not exist in the API server; it was deleted"
                ) from error
            raise
        self._claim_pods.note(ref.uid, claim.pods)
        return claim

    def look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """The claim of that name as the API server has it now; None if the API server says that there is none.

        Raises: ApiUnavailableError, ApiRejectedError if the API server does not tell.
        """
        now = self._client.look(ref, timeout_s=timeout_s)
        if now is not None:
            self._claim_pods.note(now.uid, now.pods)
        return now


class ClaimFetch:
    """Reads the claims of a call. It holds no lock."""

    def __init__(self, lookup: ClaimLookup, records: RecordStore, driver: str) -> None:
        self._lookup = lookup
        self._records = records
        self._driver = driver

    def allocated(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """Our part of a claim of the call: from the API server, or from the record if the API server does not tell.

        Raises: as `ClaimLookup.read`; RetryableError.
        """
        known = self._records.get(ref.uid)
        is_prepared = known is not None and known.phase == "prepared"
        try:
            if is_prepared:
                return our_part(self._lookup.read(ref, call.left_for_known()), self._driver)
            return our_part(self._read(ref, call), self._driver)
        except (ApiUnavailableError, ApiRejectedError) as error:
            # A refusal (no permission, version not served) says as little about the claim as no answer at all.
            if known is None or not is_prepared:
                raise
            _log.warning("claim_read_from_record", claim_uid=ref.uid, reason=str(error))
            return known.claim

    def _read(self, ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        """As `ClaimLookup.read`. If the API server is busy or starts, and the kubelet still waits, the claim is read
        again: the kubelet would come back after a minute or more."""
        backoff = Backoff(_FIRST_PAUSE_S, _MOST_PAUSE_S)
        while True:
            try:
                return self._lookup.read(ref, call.left())
            except ApiUnavailableError as error:
                if not error.is_brief and error.retry_after_s is None:
                    raise
                pause = backoff.next(error.retry_after_s)
                if pause >= call.left():
                    raise
            again = time.monotonic() + pause
            while (rest := again - time.monotonic()) > 0:
                time.sleep(min(rest, _LOOK_EVERY_S))
                call.left()  # raises if the kubelet has cancelled the call meanwhile
