from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dra_driver.claims import calls
from dra_driver.claims.calls import ClaimFetch, KubeletCall
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, ClaimRefusedError, DraDriverError
from dra_driver.journal.records import RecordStore
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import ApiClient
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.record import ClaimRecord
from tests.fakes.clock import Clock
from tests.fakes.samples import DRIVER, GPU_0, claim


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch):
    """Set with what error the API server answers."""

    def set_answer(error: Exception) -> ClaimClient:
        def call(_api: ApiClient, *_: str, timeout_s: float, **_names: str) -> None:
            assert timeout_s == 3.0
            raise error

        monkeypatch.setattr(ApiClient, "call", call)
        return ClaimClient(object.__new__(ApiClient))

    return set_answer


def test_claim_that_is_gone_is_refused(answer) -> None:
    gone = ApiRejectedError("not found", status=404, reason="NotFound")
    with pytest.raises(ClaimRefusedError) as caught:
        answer(gone).read(claim().ref, 3.0)
    assert str(caught.value) == ("claim default/claim-uid-1 does not exist in the API server; it was deleted")


@pytest.mark.parametrize(
    "error",
    [
        ApiRejectedError("forbidden", status=403),
        ApiRejectedError("a page of a proxy", status=404),
        PathNotFoundError("not served", status=404, reason="NotFound"),
        ApiUnavailableError("down"),
    ],
)
def test_other_errors_pass(answer, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        answer(error).read(claim().ref, 3.0)
    assert caught.value is error


class Answers:
    """A lookup that gives one answer after the other, the last one for ever, and counts the questions."""

    def __init__(self, *answers: AllocatedClaim | Exception) -> None:
        self._answers = list(answers)
        self.requested = 0

    def read(self, _ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        assert timeout_s > 0
        self.requested += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def fetched(tmp_path: Path, lookup: Answers, call: KubeletCall, *known: ClaimRecord) -> object:
    records = RecordStore(tmp_path / "claims")
    records.open("boot-1")
    for record in known:
        records.save(record)
    try:
        return ClaimFetch(lookup, records, DRIVER).allocated(claim().ref, call)  # type: ignore[arg-type]
    except DraDriverError as error:
        return error


def busy(retry_after_s: float | None) -> ApiUnavailableError:
    return ApiUnavailableError("get claim: too many requests (HTTP 429)", retry_after_s=retry_after_s)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_FIRST_PAUSE_S", 0.01)


def test_server_that_says_when_to_come_back_is_queried_again_within_the_call(tmp_path: Path) -> None:
    starting = ApiUnavailableError("get claim: connection refused", is_brief=True)
    lookup = Answers(busy(0.0), starting, busy(0.2), claim(GPU_0))
    began = time.monotonic()
    assert fetched(tmp_path, lookup, KubeletCall.begin(30)) == claim(GPU_0)
    assert lookup.requested == 4
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(
    "error",
    [
        busy(60.0),
        ApiUnavailableError("get claim: the certificate is not trusted"),
        ApiRejectedError("get claim: bad request (HTTP 400)", status=400),
    ],
)
def test_other_answers_are_reported_at_once(tmp_path: Path, error: Exception) -> None:
    lookup = Answers(error)
    assert fetched(tmp_path, lookup, KubeletCall.begin(30)) is error
    assert lookup.requested == 1


@pytest.mark.parametrize(
    "error",
    [
        busy(0.0),
        ApiUnavailableError("get claim: internal error (HTTP 500)", is_brief=True),
        ApiRejectedError("get claim: unauthorized (HTTP 401)", status=401),
        ApiRejectedError("get claim: forbidden (HTTP 403)", status=403),
    ],
)
def test_server_that_is_busy_or_fails_or_gets_its_rights_late_is_retried_until_the_deadline(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    times = SimpleNamespace(monotonic=clock, sleep=clock.pause, monotonic_ns=lambda: int(clock() * 1e9))
    monkeypatch.setattr(calls, "time", times)
    lookup = Answers(error, error, claim(GPU_0))
    assert fetched(tmp_path, lookup, KubeletCall.begin(30)) == claim(GPU_0)
    assert lookup.requested == 3
    lasting = Answers(error)
    assert fetched(tmp_path, lasting, KubeletCall.begin(2.5)) is error
    assert lasting.requested > 1


@pytest.mark.parametrize("deadline_s", [None, 46.0, 3600.0, 2.0**63])
def test_a_call_waits_no_longer_than_the_kubelet_when_its_caller_would(deadline_s: float | None) -> None:
    """gRPC has a number for a caller that never gives up."""
    assert 42.0 < KubeletCall.begin(deadline_s).left() <= 43.0


def test_call_that_the_kubelet_cancelled_sends_no_more_requests(tmp_path: Path) -> None:
    lookup = Answers(busy(0.0))
    error = fetched(tmp_path, lookup, KubeletCall.begin(30, lambda: lookup.requested == 3))
    assert "cancelled this call" in str(error)
    assert lookup.requested == 3
