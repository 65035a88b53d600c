"""Do the admission policies refuse what a node must not do? Dry runs of such requests prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.diagnostics.rules.admission import (
    EXEMPT_VERB,
    MARK_RESOURCE,
    MARK_VERB,
    accounts_with_the_mark,
    binding_problem,
    refusal,
)
from dra_driver.diagnostics.rules.findings import Finding, fail, ok, skip, warn, worst
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import MERGE_PATCH, ApiClient
from dra_driver.kube.convert import GROUP
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import ClaimRef

JsonObject = dict[str, Any]

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_NODE_KEY = "authentication.kubernetes.io/node-name"
_FOREIGN = "not-this-node.invalid"
_MOST_CLAIMS = 500
_APPLY = "`kubectl apply -k daemonset` as an administrator"
_SLICE: JsonObject = {
    "apiVersion": f"{GROUP}/v1",
    "kind": "ResourceSlice",
    "metadata": {"generateName": "gpu-dra-driver-probe-"},
}
_CONSUMER = {"resource": "pods", "name": "gpu-dra-driver-probe", "uid": "gpu-dra-driver-probe"}


@dataclass(frozen=True, slots=True)
class AdmissionProof:
    """Asks as the driver: with its own token, or for an administrator as the account that has the driver's mark.

    `claims` are those that the driver of this node has prepared. Raises from both: as ApiClient.
    """

    client: ApiClient
    driver: str
    node: str
    claims: Callable[[], Sequence[ClaimRef]]

    def slices(self) -> Finding:
        """May the driver write a slice of another node?"""
        return worst([self._slices(who, client) for who, client in self._drivers()] or [self._nobody()])

    def claim_status(self) -> Finding:
        """May the driver change to whom a claim's devices are given?"""
        bound = self._binding_problem("resourceclaims/status")
        claim = self._allocated_claim()
        if claim is None:
            if bound is None:
                return skip("no claim with a device is known here, so there is none to try it on")
            return (
                self._not_bound(bound)
                if bound
                else ok("a policy is installed and bound; no claim to try it on")
            )
        found = [self._claim_status(who, client, claim, bound) for who, client in self._drivers()]
        return worst(found or [self._nobody()])

    def _slices(self, who: str, client: ApiClient) -> Finding:
        foreign = {"name": _FOREIGN, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": self.driver, "nodeName": _FOREIGN, "pool": foreign, "devices": []}
        try:
            ResourceApi(client).call(
                *("POST", "resourceslices"),
                action="try a slice of another node",
                query={"dryRun": "All"},
                body=_SLICE | {"spec": spec},
            )
        except ApiRejectedError as error:
            return self._refused(error, who, "a slice of another node")
        problem = self._binding_problem("resourceslices")
        return self._accepted(who, "publish slices of other nodes", problem)

    def _claim_status(self, who: str, client: ApiClient, claim: JsonObject, bound: str | None) -> Finding:
        metadata, status = claim["metadata"], claim["status"]
        try:
            ResourceApi(client).call(
                *("PATCH", "resourceclaims"),
                action="try to take a claim for another pod",
                namespace=metadata["namespace"],
                name=metadata["name"],
                subresource="status",
                query={"dryRun": "All"},
                body={"status": {"reservedFor": [*(status.get("reservedFor") or ()), _CONSUMER]}},
                content_type=MERGE_PATCH,
            )
        except ApiRejectedError as error:
            if refusal(error).by != "server":
                return self._refused(error, who, "a change of who uses a claim")
            if bound:
                return self._not_bound(bound)
            return ok(
                f"the API server itself refused {who} a change of who uses a claim, as Kubernetes 1.36 and newer do"
                + ("" if bound is None else "; the policy for older ones is bound")
            )
        return self._accepted(who, "change who gets which device", bound)

    def _refused(self, error: ApiRejectedError, who: str, what: str) -> Finding:
        """What a refusal is worth."""
        found = refusal(error)
        if found.lacks_node:
            return fail(
                f"{found.name} refused {who}: its token names no node, so the driver can publish nothing",
                "mount a token of the pod, as daemonset/base does (volume api-token), and restart the pod",
            )
        if found.by == "ours":
            return ok(f"{found.name} refused {who} {what}")
        if found.by == "rbac":
            return skip(
                f"RBAC lets {who} write nothing of that sort, so no policy was asked; run doctor in the driver's pod"
            )
        return skip(f"{found.name} refused {who} {what} before the driver's policy was asked")

    def _accepted(self, who: str, what: str, problem: str | None) -> Finding:
        """The server took what it should refuse; `problem` is what is known of the policies."""
        why = (
            problem or self._unmarked(who) or "the policy is missing, not bound, or its binding does not deny"
        )
        return warn(f"a node that was broken into could {what}: {who} was not refused; {why}", _APPLY)

    def _unmarked(self, who: str) -> str | None:
        if who != "this account" or self._may(MARK_VERB):
            return None
        return (
            f"its role lacks the mark ({MARK_VERB} {MARK_RESOURCE}.{self.driver}) that the policies look for"
        )

    def _not_bound(self, problem: str) -> Finding:
        return warn(
            f"nothing but the API server's own checks protects the status of claims: {problem}", _APPLY
        )

    def _nobody(self) -> Finding:
        return warn(
            f"no account has the mark ({MARK_VERB} {MARK_RESOURCE}.{self.driver}), so the policies apply to nobody",
            f"{_APPLY} (ClusterRole gpu-dra-driver)",
        )

    def _drivers(self) -> Iterator[tuple[str, ApiClient]]:
        """In whose name to ask, and the client for it: an administrator's own requests would prove nothing."""
        if not self._may(EXEMPT_VERB):
            yield "this account", self.client
            return
        roles = self._items(f"{_RBAC}/clusterroles", "list the cluster roles")
        bindings = self._items(f"{_RBAC}/clusterrolebindings", "list the cluster role bindings")
        for namespace, name in accounts_with_the_mark(self.driver, roles, bindings):
            user = f"system:serviceaccount:{namespace}:{name}"
            yield f"{namespace}/{name}", self.client.acting_as(user, {_NODE_KEY: self.node})

    def _may(self, verb: str) -> bool:
        attributes = {"verb": verb, "group": self.driver, "resource": MARK_RESOURCE}
        answer = self.client.request(
            "POST",
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            action=f"ask whether I may {verb} {MARK_RESOURCE}",
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            },
        )
        return bool((answer.get("status") or {}).get("allowed"))

    def _binding_problem(self, resource: str) -> str | None:
        """As `binding_problem`, but "" if there is no problem, and None if these credentials may not look."""
        try:
            policies = self._items(f"{_ADMISSION}/validatingadmissionpolicies", "list the policies")
            bindings = self._items(f"{_ADMISSION}/validatingadmissionpolicybindings", "list the bindings")
        except ApiRejectedError as error:
            if error.status in (401, 403):
                return None
            raise
        return binding_problem(resource, self.driver, policies, bindings) or ""

    def _allocated_claim(self) -> JsonObject | None:
        """One that this node has prepared, or for who may list them any; with a device of this driver."""
        api = ResourceApi(self.client)
        for ref in self.claims():
            try:
                claim = api.call(
                    "GET", "resourceclaims", action=f"get claim {ref}", namespace=ref.namespace, name=ref.name
                )
            except ApiRejectedError as error:
                if error.status == 404:
                    continue
                raise
            if self._is_allocated(claim):
                return claim
        try:
            query = {"limit": str(_MOST_CLAIMS)}
            listed = api.call("GET", "resourceclaims", action="list claims", query=query).get("items") or ()
        except ApiRejectedError as error:
            if error.status in (401, 403):
                return None
            raise
        return next((claim for claim in listed if self._is_allocated(claim)), None)

    def _is_allocated(self, claim: JsonObject) -> bool:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        results = (allocation.get("devices") or {}).get("results") or ()
        return any(result.get("driver") == self.driver for result in results)

    def _items(self, path: str, action: str) -> list[JsonObject]:
        return list(self.client.request("GET", path, action=action).get("items") or ())
