"""What the answers of the API server show of the admission policies that confine gpu-dra-driver to its node."""

from __future__ import annotations

import re

from dra_driver.cli.rules.findings import Finding, fail, ok, skip
from dra_driver.errors import ApiRejectedError

_FORBIDDEN = 403

MARK_RESOURCE = "drivers"
MARK_VERB = "confine"
EXEMPT_VERB = "exempt"
"""Of the API group with the name of our DRA driver. The policies apply to who may do the first and not the second."""

_BY_POLICY = re.compile(
    r"ValidatingAdmissionPolicy '(?P<policy>[^']*)' with binding '[^']*' denied request: (?P<text>.*)"
)
_BY_WEBHOOK = re.compile(r"admission webhook (?P<name>\"[^\"]*\") denied the request")
_NO_NODE = "token names no node"
_OURS = (
    _NO_NODE,
    "may not modify resource slices of another node",
    "may not change the allocation of a claim or who uses it",
)
_OWN_CHECK = re.compile(r'requires resource="?resourceclaims/')
"""How Kubernetes 1.36 and newer refuse the status of a claim, before they ask any policy."""


def refusal_finding(error: ApiRejectedError, what: str) -> Finding:
    """What a refusal of `what` proves: OK if a policy of gpu-dra-driver or Kubernetes itself refused it."""
    text = str(error)
    policy, webhook = _BY_POLICY.search(text), _BY_WEBHOOK.search(text)
    is_ours = policy is not None and any(part in policy["text"] for part in _OURS)
    if policy is not None:
        name = f"the policy {policy['policy']}"
    elif webhook is not None:
        name = f"the webhook {webhook['name']}"
    elif _OWN_CHECK.search(text):
        return ok(f"the API server itself refused this account {what}, as Kubernetes 1.36 and newer do")
    elif error.status == _FORBIDDEN and " cannot " in text:
        return skip(
            "RBAC lets this account write nothing of that sort, so no policy was asked; run doctor in the pod of "
            "gpu-dra-driver"
        )
    else:
        name = f"the API server ({text})"
    if is_ours and _NO_NODE in text:
        return fail(
            f"{name} refused this account: its token names no node, so gpu-dra-driver can publish nothing",
            "mount a token of the pod, as the chart does (volume api-token), and restart the pod",
        )
    if is_ours:
        return ok(f"{name} refused this account {what}")
    return skip(f"{name} refused this account {what} before the policy of gpu-dra-driver was asked")
