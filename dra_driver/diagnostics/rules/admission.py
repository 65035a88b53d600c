"""What the answers of the API server show of the admission policies that confine gpu-dra-driver to its node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dra_driver.errors import ApiRejectedError

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Who refused a request. `by` is "ours" for a policy of gpu-dra-driver, "server" for what Kubernetes itself checks,
    "rbac" for a missing right, "other" for the rest; `name` says it for people."""

    by: str
    name: str
    lacks_node: bool = False


def refusal(error: ApiRejectedError) -> Refusal:
    """Who stands behind an answer of the API server."""
    text = str(error)
    policy = _BY_POLICY.search(text)
    if policy is not None:
        name = f"the policy {policy['policy']}"
        if any(part in policy["text"] for part in _OURS):
            return Refusal("ours", name, _NO_NODE in policy["text"])
        return Refusal("other", name)
    webhook = _BY_WEBHOOK.search(text)
    if webhook is not None:
        return Refusal("other", f"the webhook {webhook['name']}")
    if _OWN_CHECK.search(text):
        return Refusal("server", "the API server itself")
    if error.status == 403 and " cannot " in text:
        return Refusal("rbac", "RBAC")
    return Refusal("other", f"the API server ({text})")
