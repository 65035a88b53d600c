"""How doctor proves the admission policies; tests/e2e/test_permissions.py does it with a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from dra_driver.cli.checks.admission import AdmissionProof, refusal_finding
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.model.claim import ClaimRef
from tests.cli.test_doctor import DRIVER, NODE, says
from tests.fakes.tables import data_of, tabled

Json = dict[str, Any]


def answer_of(name: str) -> ApiRejectedError:
    answer = data_of(__file__)["answers"][name]
    return ApiRejectedError(answer["text"], status=answer["status"])


@tabled("answer", "status", "parts")
def test_error_names_the_admission_plugin_that_refused(answer: Json, status: str, parts: list[str]) -> None:
    says(refusal_finding(ApiRejectedError(answer["text"], status=answer["status"]), "it"), status, *parts)


FORBIDDEN = answer_of("forbidden")
CLAIM = {
    "kind": "ResourceClaim",
    "metadata": {"name": "c1", "namespace": "default"},
    "status": {"allocation": {"devices": {"results": [{"driver": DRIVER, "pool": NODE, "device": "gpu-1"}]}}},
}


class Server:
    """Answers of an API server to one account: `rights` on the mark, `writes` by method, the rest by path."""

    call = ApiClient.call

    def __init__(self, *rights: str, **writes: Exception | None) -> None:
        self.rights = rights
        self.writes = writes
        self.objects: dict[str, Any] = {}

    def request(
        self, method: str, path: str, *, action: str, body: Any = None, query: Any = None, **_more: Any
    ) -> Json:
        if path.endswith("selfsubjectaccessreviews"):
            wanted = body["spec"]["resourceAttributes"]
            assert (wanted["group"], wanted["resource"]) == (DRIVER, "drivers")
            return {"status": {"allowed": wanted["verb"] in self.rights}}
        if method in ("POST", "PATCH"):
            assert query == {"dryRun": "All"}
            answer = self.writes[method.lower()]
            if answer is not None:
                raise answer
            return dict(body)
        found = self.objects.get(path.removeprefix("/apis/"), FORBIDDEN)
        if isinstance(found, Exception):
            raise found
        return dict(found)


def proof(server: Server, *claims: str) -> AdmissionProof:
    refs = [ClaimRef("default", name, "u") for name in claims]
    return AdmissionProof(server, DRIVER, lambda: refs)  # type: ignore[arg-type]


@tabled("rights", "answer", "status", "parts")
def test_with_the_pods_own_token(
    rights: list[str], answer: str | None, status: str, parts: list[str]
) -> None:
    says(proof(Server(*rights, post=answer_of(answer) if answer else None)).slices(), status, *parts)


def test_an_api_server_that_is_away_is_not_a_fault() -> None:
    with pytest.raises(ApiUnavailableError):
        proof(Server("confine", post=ApiUnavailableError("away"))).slices()


def test_an_account_to_which_the_policies_do_not_apply_proves_nothing() -> None:
    admin = proof(Server("confine", "exempt"), "c1")
    for found in (admin.slices(), admin.claim_status()):
        says(found, "SKIP", "exempt drivers.gpu.nvidia.com", "run doctor in the pod of gpu-dra-driver")


def test_the_status_of_claims_in_the_pod() -> None:
    """Where RBAC lets it: on a claim of the node, which the driver knows by name."""
    old = Server("confine", patch=answer_of("policy"))
    says(proof(old).claim_status(), "SKIP", "not tested: no prepared claim")
    path = "resource.k8s.io/v1/namespaces/default/resourceclaims"
    gone = ApiRejectedError("not found", status=404, reason="NotFound")
    for server, status, parts in (
        (Server("confine", patch=None), "WARN", ("could change which pods use a claim",)),
        (Server("confine", patch=answer_of("server")), "OK", ("the API server itself",)),
        (Server("confine", patch=FORBIDDEN), "SKIP", ("so the policy of gpu-dra-driver was not tested",)),
    ):
        server.objects = {f"{path}/gone": gone, f"{path}/c1": CLAIM}
        says(proof(server, "gone", "c1").claim_status(), status, *parts)
