from __future__ import annotations

import pytest

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, ClaimRefusedError
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.services.claimreader import ClaimReader
from tests.core.samples import GPU_0, claim


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch):
    """Sets what the API server answers: a claim, or an error."""

    def set_answer(value: AllocatedClaim | Exception) -> ClaimReader:
        def get(_client: ClaimClient, ref: ClaimRef, *, timeout_s: float) -> AllocatedClaim:
            assert timeout_s == 3.0
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(ClaimClient, "get_allocated", get)
        return ClaimReader(None)  # type: ignore[arg-type]

    return set_answer


def test_claim_is_passed_on(answer) -> None:
    assert answer(claim(GPU_0)).read(claim().ref, 3.0) == claim(GPU_0)


def test_claim_that_is_gone_is_refused(answer) -> None:
    gone = ApiRejectedError("not found", status=404)
    with pytest.raises(ClaimRefusedError) as caught:
        answer(gone).read(claim().ref, 3.0)
    assert str(caught.value) == ("claim default/claim-uid-1 does not exist in the API server; it was deleted")
    assert caught.value.__cause__ is gone


@pytest.mark.parametrize("error", [ApiRejectedError("forbidden", status=403), ApiUnavailableError("down")])
def test_other_errors_pass(answer, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        answer(error).read(claim().ref, 3.0)
    assert caught.value is error
