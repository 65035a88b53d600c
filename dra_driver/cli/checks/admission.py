"""Tests with dry runs that admission policies refuse requests that a node must not make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dra_driver.base.installation import apply_again
from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import GROUP_VERSION, MERGE_PATCH, ApiClient
from dra_driver.kube.cluster import Permission, is_allowed
from dra_driver.model.claim import ClaimRef, allocation_results
from dra_driver.model.dataclass import dataclass
from dra_driver.model.schema import JsonObject

_FORBIDDEN = 403

MARK_RESOURCE = "drivers"
MARK_VERB = "confine"
EXEMPT_VERB = "exempt"
"""The policies apply to accounts that have `confine` but not `exempt` for `drivers`, in the API group named like the
driver.
"""

_BY_POLICY = re.compile(
    r"ValidatingAdmissionPolicy '(?P<policy>[^']*)' with binding '[^']*' denied request: (?P<text>.*)"
)
_BY_WEBHOOK = re.compile(r"admission webhook (?P<name>\"[^\"]*\") denied the request")
_NO_NODE = "token does not name a node"
_OURS = (
    _NO_NODE,
    "may not modify resource slices of another node",
    "may not change the allocation of a claim or who uses it",
)
_OWN_CHECK = re.compile(r'requires resource="?resourceclaims/')
"""Kubernetes 1.36 and newer reject a claim status with this error, before any policy runs."""


def refusal_finding(error: ApiRejectedError, what: str) -> Finding:
    """Return OK if a policy of gpu-dra-driver or Kubernetes itself refused to do `what`."""
    text = str(error)
    policy, webhook = _BY_POLICY.search(text), _BY_WEBHOOK.search(text)
    is_ours = policy is not None and any(part in policy["text"] for part in _OURS)
    if policy is not None:
        name = f"the policy {policy['policy']}"
    elif webhook is not None:
        name = f"the webhook {webhook['name']}"
    elif _OWN_CHECK.search(text):
        return ok(f"the API server itself does not let this account {what} (Kubernetes 1.36 and newer)")
    elif error.status == _FORBIDDEN and " cannot " in text:
        return skip(
            "RBAC refused the test request of this account, so no policy was tested; run doctor in the pod of "
            "gpu-dra-driver"
        )
    else:
        name = f"the API server ({text})"
    if is_ours and _NO_NODE in text:
        return fail(
            f"{name} refused this account: its token does not name a node, so gpu-dra-driver cannot publish slices",
            "mount a token that is bound to the pod, as the chart does (volume api-token), and restart the pod",
        )
    if is_ours:
        return ok(f"{name} does not let this account {what}")
    return skip(f"{name} did not let this account {what}, so the policy of gpu-dra-driver was not tested")


_FOREIGN = "not-this-node.invalid"
_SLICE: JsonObject = {
    "apiVersion": GROUP_VERSION,
    "kind": "ResourceSlice",
    "metadata": {"generateName": "gpu-dra-driver-probe-"},
}
_CONSUMER = {"resource": "pods", "name": "gpu-dra-driver-probe", "uid": "gpu-dra-driver-probe"}


@dataclass(frozen=True, slots=True)
class AdmissionProof:
    """Checks the policies with the token of gpu-dra-driver, because they do not apply to other accounts."""

    client: ApiClient
    driver: str
    claims: Callable[[], Sequence[ClaimRef]]

    def slices(self) -> Finding:
        if self._may(EXEMPT_VERB):
            return self._exempt()
        pool = {"name": _FOREIGN, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": self.driver, "nodeName": _FOREIGN, "pool": pool, "devices": []}
        try:
            self.client.call(
                *("POST", "resourceslices"),
                action="test creating a slice for another node",
                query={"dryRun": "All"},
                body=_SLICE | {"spec": spec},
            )
        except ApiRejectedError as error:
            return refusal_finding(error, "publish slices for another node")
        return self._accepted("publish slices for another node")

    def claim_status(self) -> Finding:
        if self._may(EXEMPT_VERB):
            return self._exempt()
        claim = self._allocated_claim()
        if claim is None:
            return skip("not tested: no prepared claim on this node")
        metadata, status = claim["metadata"], claim["status"]
        try:
            self.client.call(
                *("PATCH", "resourceclaims"),
                action="test changing the pods of a claim",
                namespace=metadata["namespace"],
                name=metadata["name"],
                subresource="status",
                query={"dryRun": "All"},
                body={"status": {"reservedFor": [*(status.get("reservedFor") or ()), _CONSUMER]}},
                content_type=MERGE_PATCH,
            )
        except ApiRejectedError as error:
            return refusal_finding(error, "change which pods use a claim")
        return self._accepted("change which pods use a claim")

    def _accepted(self, what: str) -> Finding:
        why = "the policy is missing or not bound, or its binding does not deny requests"
        if not self._may(MARK_VERB):
            why = f"this account lacks the permission {MARK_VERB} {MARK_RESOURCE}.{self.driver}, so no policy applies"
        return warn(
            f"an attacker on this node could {what}: the API server accepted this request in a dry run; {why}",
            apply_again(),
        )

    def _exempt(self) -> Finding:
        return skip(
            f"this account has the permission {EXEMPT_VERB} {MARK_RESOURCE}.{self.driver}, so no policy applies; run "
            "doctor in the pod of gpu-dra-driver"
        )

    def _may(self, verb: str) -> bool:
        return is_allowed(self.client, Permission(verb, MARK_RESOURCE, self.driver))

    def _allocated_claim(self) -> JsonObject | None:
        lookup = ClaimClient(self.client)
        for ref in self.claims():
            claim = lookup.find(ref)
            if claim is not None and any(
                result.get("driver") == self.driver for result in allocation_results(claim)
            ):
                return claim
        return None
