"""Reading an allocated claim for Prepare, with the API server's refusals turned into the claim's own."""

from __future__ import annotations

from dra_driver.errors import ApiRejectedError, ClaimRefusedError
from dra_driver.kube.apierrors import PathNotFoundError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef

_NOT_FOUND = 404


class ClaimReader:
    """Reads claims through the API server."""

    def __init__(self, api: ResourceApi) -> None:
        self._client = ClaimClient(api)

    def read(self, ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        """The claim with the allocation of all drivers.

        Raises: ClaimRefusedError if it is gone, replaced or not allocated; ApiUnavailableError, ApiRejectedError if
        the API server says nothing of it.
        """
        try:
            return self._client.get_allocated(ref, timeout_s=timeout_s)
        except PathNotFoundError:
            raise
        except ApiRejectedError as error:
            if error.status == _NOT_FOUND:
                raise ClaimRefusedError(
                    f"claim {ref.namespace}/{ref.name} does not exist in the API server; it was deleted"
                ) from error
            raise

    def look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """What the API server says of the claim of that name; None if it says that there is none.

        Raises: ApiUnavailableError, ApiRejectedError if it says nothing of it.
        """
        return self._client.look(ref, timeout_s=timeout_s)
