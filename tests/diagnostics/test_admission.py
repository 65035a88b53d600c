"""How doctor proves the admission policies; tests/e2e/test_permissions.py does it with a real API server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.diagnostics.doctor.admission import AdmissionProof
from dra_driver.diagnostics.rules.admission import Refusal, binding_problem, refusal
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.model.claim import ClaimRef
from tests.diagnostics.test_doctor import DRIVER, NODE, says

BASE = Path(__file__).parents[2] / "daemonset/base"
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
BY_NOBODY = (
    'serviceaccounts "b" is forbidden: User "x" cannot impersonate resource "serviceaccounts" (HTTP 403)'
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
        (BY_NOBODY, 403, Refusal("other", f"the API server ({BY_NOBODY})")),
        (BY_WEBHOOK, 403, Refusal("other", 'the webhook "guard.example.com"')),
    ],
)
def test_who_refused(text: str, status: int, found: Refusal) -> None:
    assert refusal(ApiRejectedError(text, status=status)) == found


def installed(*files: str) -> list[Json]:
    return [item for file in files for item in yaml.safe_load_all((BASE / file).read_text())]


def test_what_is_installed_is_found_by_the_mark_whatever_it_is_called() -> None:
    policy, binding = installed("admission-policy.yaml")
    policy["metadata"]["name"] = binding["spec"]["policyName"] = "other"
    assert binding_problem("resourceslices", DRIVER, [policy], [binding]) is None
    status, status_binding = installed("claim-status-policy.yaml")
    assert binding_problem("resourceclaims/status", DRIVER, [status], [status_binding]) is None
    assert "no policy for resourceclaims/status" in str(
        binding_problem("resourceclaims/status", DRIVER, [policy], [binding])
    )
    assert "no policy" in str(binding_problem("resourceslices", "gpu.example.com", [policy], [binding]))
    assert binding_problem("resourceslices", DRIVER, [policy], []) == "the policy other has no binding"
    binding["spec"]["validationActions"] = ["Warn", "Audit"]
    assert "says Warn, Audit, not Deny" in str(binding_problem("resourceslices", DRIVER, [policy], [binding]))


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
        self.asked_as: dict[str, Server] = {}

    def acting_as(self, user: str, extra: Mapping[str, str]) -> Server:
        assert extra == {"authentication.kubernetes.io/node-name": NODE}
        return self.asked_as[user]

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
        return {"items": found} if isinstance(found, list) else found


def proof(server: Server, *claims: str) -> AdmissionProof:
    refs = [ClaimRef("default", name, "u") for name in claims]
    return AdmissionProof(server, DRIVER, NODE, lambda: refs)  # type: ignore[arg-type]


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


def administrator(**writes: Exception | None) -> tuple[Server, Server]:
    """An administrator, who is exempt, and the renamed driver as the server sees it."""
    admin, driver = Server("confine", "exempt"), Server("confine", **writes)
    role, binding = installed("rbac.yaml")[1:]
    everything = {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    role["metadata"]["name"] = binding["roleRef"]["name"] = "team-a"
    binding["subjects"][0] |= {"name": "team-a", "namespace": "gpus"}
    root = {
        "roleRef": {"kind": "ClusterRole", "name": "root"},
        "subjects": [{"kind": "ServiceAccount", "name": "x", "namespace": "y"}],
    }
    rbac, admission = "rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1"
    admin.objects = {
        f"{rbac}/clusterroles": [{"metadata": {"name": "root"}} | everything, role],
        f"{rbac}/clusterrolebindings": [root, binding],
        f"{admission}/validatingadmissionpolicies": [],
        f"{admission}/validatingadmissionpolicybindings": [],
        "resource.k8s.io/v1/resourceclaims": [CLAIM],
    }
    admin.asked_as = {"system:serviceaccount:gpus:team-a": driver}
    return admin, driver


def test_an_administrator_asks_in_the_drivers_name_and_is_told_why_it_was_not_refused() -> None:
    admin, _ = administrator(post=TAKEN)
    says(proof(admin).slices(), "OK", "refused gpus/team-a")
    admin, driver = administrator(post=None)
    says(proof(admin).slices(), "WARN", "no policy for resourceslices by the mark of gpu.nvidia.com")
    policy, binding = installed("admission-policy.yaml")
    place = "admissionregistration.k8s.io/v1"
    admin.objects[f"{place}/validatingadmissionpolicies"] = [policy]
    says(proof(admin).slices(), "WARN", "gpu-dra-driver-own-node has no binding")
    binding["spec"]["validationActions"] = ["Audit"]
    admin.objects[f"{place}/validatingadmissionpolicybindings"] = [binding]
    says(proof(admin).slices(), "WARN", "says Audit, not Deny")
    admin.asked_as = {}
    admin.objects["rbac.authorization.k8s.io/v1/clusterroles"] = []
    says(proof(admin).slices(), "WARN", "no account has the mark", "ClusterRole gpu-dra-driver")
    assert driver.rights == ("confine",)


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


def test_the_status_of_claims_for_an_administrator() -> None:
    admin, driver = administrator(patch=ApiRejectedError(BY_SERVER, status=422))
    says(proof(admin).claim_status(), "WARN", "nothing but the API server's own checks", "no policy for")
    policy, binding = installed("claim-status-policy.yaml")
    place = "admissionregistration.k8s.io/v1"
    admin.objects[f"{place}/validatingadmissionpolicies"] = [policy]
    admin.objects[f"{place}/validatingadmissionpolicybindings"] = [binding]
    says(proof(admin).claim_status(), "OK", "the policy for older ones is bound")
    driver.writes = {"patch": None}
    says(proof(admin).claim_status(), "WARN", "gpus/team-a was not refused")
    admin.objects["resource.k8s.io/v1/resourceclaims"] = []
    says(proof(admin).claim_status(), "OK", "no claim to try it on")
