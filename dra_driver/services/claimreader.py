"""Reading an allocated claim for Prepare, with the API server's refusals turned into the claim's own."""

from __future__ import annotations

from collections.abc import Callable

from dra_driver.errors import ApiRejectedError, ClaimRefusedError
from dra_driver.kube.apierrors import PathNotFoundError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef, Pods

_NOT_FOUND = 404


def _unnoted(_uid: str, _pods: Pods) -> None:
    pass


class ClaimReader:
    """Reads claims through the API server."""

    def __init__(self, api: ResourceApi, note_pods: Callable[[str, Pods], None] = _unnoted) -> None:
        """`note_pods` hears of the pods of every claim that is read, by its UID; it must neither block nor raise."""
        self._client = ClaimClient(api)
        self._note_pods = note_pods

    def read(self, ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        """The claim with the allocation of all drivers.

        Raises: ClaimRefusedError if it is gone, replaced or not allocated; ApiUnavailableError, ApiRejectedError if
        the API server says nothing of it.
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
        self._note_pods(ref.uid, claim.pods)
        return claim

    def look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """What the API server says of the claim of that name; None if it says that there is none.

        Raises: ApiUnavailableError, ApiRejectedError if it says nothing of it.
        """
        now = self._client.look(ref, timeout_s=timeout_s)
        if now is not None:
            self._note_pods(now.uid, now.pods)
        return now
