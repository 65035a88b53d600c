"""How doctor proves the admission policies; tests/e2e/test_permissions.py does it with a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from dra_driver.diagnostics.doctor.admission import AdmissionProof
from dra_driver.diagnostics.rules.admission import Refusal, refusal
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.model.claim import ClaimRef
from tests.diagnostics.test_doctor import DRIVER, NODE, says

Json = dict[str, Any]

# As Kubernetes 1.36.3 writes them.
_DENIED = (
    "resourceslices.resource.k8s.io \"probe\" is forbidden: ValidatingAdmissionPolicy 'team-a-own-node' with binding "
    "'team-a-own-node' denied request: "
)
BY_POLICY = (
    f"{_DENIED}this user running on node 'a' may not modify resource slices of another node (HTTP 403)"
)
NO_NODE = f"{_DENIED}this user's token names no node, so it may not modify resource slices (HTTP 403)"
BY_OTHERS = f"{_DENIED}no slices on Sundays (HTTP 403)"
BY_RBAC = (
    'resourceslices.resource.k8s.io is forbidden: User "system:serviceaccount:a:b" cannot create resource '
    '"resourceslices" in API group "resource.k8s.io" at the cluster scope (HTTP 403)'
)
BY_SERVER = (
    'ResourceClaim.resource.k8s.io "c1" is invalid: status.allocation: Forbidden: changing status.allocation or '
    'status.reservedFor requires resource="resourceclaims/binding", verb="patch" permission: '
    'resourceclaims.resource.k8s.io is forbidden: User "system:serviceaccount:a:b" cannot patch resource '
    '"resourceclaims/binding" in API group "resource.k8s.io" at the cluster scope (HTTP 422)'
)
BY_WEBHOOK = 'admission webhook "guard.example.com" denied the request: no (HTTP 403)'


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        (BY_POLICY, 403, Refusal("ours", "the policy team-a-own-node")),
        (NO_NODE, 403, Refusal("ours", "the policy team-a-own-node", lacks_node=True)),
        (BY_OTHERS, 403, Refusal("other", "the policy team-a-own-node")),
        (BY_RBAC, 403, Refusal("rbac", "RBAC")),
        (BY_SERVER, 422, Refusal("server", "the API server itself")),
        ("too large", 413, Refusal("other", "the API server (too large)")),
        (BY_WEBHOOK, 403, Refusal("other", 'the webhook "guard.example.com"')),
    ],
)
def test_who_refused(text: str, status: int, found: Refusal) -> None:
    assert refusal(ApiRejectedError(text, status=status)) == found


FORBIDDEN = ApiRejectedError("forbidden", status=403)
TAKEN = ApiRejectedError(BY_POLICY, status=403)
CLAIM = {
    "kind": "ResourceClaim",
    "metadata": {"name": "c1", "namespace": "default"},
    "status": {"allocation": {"devices": {"results": [{"driver": DRIVER, "pool": NODE, "device": "gpu-1"}]}}},
}


class Server:
    """Answers of an API server to one account: `rights` on the mark, `writes` by method, the rest by path."""

    def __init__(self, *rights: str, **writes: Exception | None) -> None:
        self.rights = rights
        self.writes = writes
        self.objects: dict[str, Any] = {}

    def request(
        self, method: str, path: str, *, action: str, body: Any = None, query: Any = None, **_more: Any
    ) -> Json:
        if path == "/apis/resource.k8s.io":
            return {"versions": [{"version": "v1"}]}
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


@pytest.mark.parametrize(
    ("rights", "answer", "status", "parts"),
    [
        (("confine",), TAKEN, "OK", ("team-a-own-node refused this account",)),
        (
            ("confine",),
            None,
            "WARN",
            ("could publish slices of other nodes", "missing, not bound", "apply -k"),
        ),
        ((), None, "WARN", ("its role lacks the mark (confine drivers.gpu.nvidia.com)",)),
        (("confine",), ApiRejectedError(BY_RBAC, status=403), "SKIP", ("RBAC lets", "the driver's pod")),
        (("confine",), ApiRejectedError(BY_OTHERS, status=403), "SKIP", ("before the driver's policy",)),
        (("confine",), ApiRejectedError(NO_NODE, status=403), "FAIL", ("names no node", "api-token")),
    ],
)
def test_with_the_pods_own_token(
    rights: tuple[str, ...], answer: Exception | None, status: str, parts: tuple[str, ...]
) -> None:
    says(proof(Server(*rights, post=answer)).slices(), status, *parts)


def test_an_api_server_that_is_away_is_nobodys_fault() -> None:
    with pytest.raises(ApiUnavailableError):
        proof(Server("confine", post=ApiUnavailableError("away"))).slices()


def test_an_account_to_which_the_policies_do_not_apply_proves_nothing() -> None:
    admin = proof(Server("confine", "exempt"), "c1")
    for found in (admin.slices(), admin.claim_status()):
        says(found, "SKIP", "exempt drivers.gpu.nvidia.com", "run doctor in the driver's pod")


def test_the_status_of_claims_in_the_pod() -> None:
    """Where RBAC lets it: on a claim of the node, which the driver knows by name."""
    old = Server("confine", patch=ApiRejectedError(BY_POLICY.replace("modify", "x"), status=403))
    says(proof(old).claim_status(), "SKIP", "no claim with a device is known here")
    path = "resource.k8s.io/v1/namespaces/default/resourceclaims"
    gone = ApiRejectedError("not found", status=404)
    for server, status, parts in (
        (Server("confine", patch=None), "WARN", ("could change who gets which device",)),
        (Server("confine", patch=ApiRejectedError(BY_SERVER, status=422)), "OK", ("the API server itself",)),
        (Server("confine", patch=FORBIDDEN), "SKIP", ("before the driver's policy was asked",)),
    ):
        server.objects = {f"{path}/gone": gone, f"{path}/c1": CLAIM}
        says(proof(server, "gone", "c1").claim_status(), status, *parts)
