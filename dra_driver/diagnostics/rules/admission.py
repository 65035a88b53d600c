"""What the API server's answers tell about the admission policies that confine the driver to its node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.errors import ApiRejectedError

JsonObject = dict[str, Any]

MARK_RESOURCE = "drivers"
MARK_VERB = "confine"
EXEMPT_VERB = "exempt"
"""Of the API group with the driver's name. The policies apply to who may do the first and not the second."""

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
    """Who refused a request. `by` is "ours" for a policy of this driver, "server" for what Kubernetes itself checks,
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
    if error.status == 403 and " cannot " in text and " cannot impersonate " not in text:
        return Refusal("rbac", "RBAC")
    return Refusal("other", f"the API server ({text})")


def binding_problem(
    resource: str, driver: str, policies: Sequence[JsonObject], bindings: Sequence[JsonObject]
) -> str | None:
    """Why no policy of the driver protects a resource, as far as policies and their bindings tell; None if one does."""
    ours = [str(policy["metadata"]["name"]) for policy in policies if _is_ours(policy, driver, resource)]
    if not ours:
        return f"no policy for {resource} by the mark of {driver} is installed"
    problems: list[str] = []
    for name in ours:
        bound = [binding for binding in bindings if (binding.get("spec") or {}).get("policyName") == name]
        if not bound:
            problems.append(f"the policy {name} has no binding")
        for binding in bound:
            actions = (binding.get("spec") or {}).get("validationActions") or []
            if "Deny" in actions:
                return None
            problems.append(
                f"the binding {binding['metadata']['name']} of the policy {name} says {', '.join(actions)}, not Deny"
            )
    return "; ".join(problems)


def accounts_with_the_mark(
    driver: str, roles: Sequence[JsonObject], bindings: Sequence[JsonObject]
) -> list[tuple[str, str]]:
    """Namespace and name of the service accounts that a ClusterRole with the mark is bound to."""
    marked = {str(role["metadata"]["name"]) for role in roles if _has_mark(role, driver)}
    found = [
        (str(subject.get("namespace")), str(subject.get("name")))
        for binding in bindings
        if (binding.get("roleRef") or {}).get("kind") == "ClusterRole"
        and binding["roleRef"].get("name") in marked
        for subject in binding.get("subjects") or ()
        if subject.get("kind") == "ServiceAccount"
    ]
    return sorted(set(found))


def _is_ours(policy: JsonObject, driver: str, resource: str) -> bool:
    spec = policy.get("spec") or {}
    conditions = " ".join(str(entry.get("expression")) for entry in spec.get("matchConditions") or ())
    constrained = {
        name
        for rule in (spec.get("matchConstraints") or {}).get("resourceRules") or ()
        for name in rule.get("resources") or ()
    }
    mark = (f'"{driver}"', f'"{MARK_RESOURCE}"', f'"{MARK_VERB}"')
    return resource in constrained and all(word in conditions for word in mark)


def _has_mark(role: JsonObject, driver: str) -> bool:
    """Whether a role names the mark. A role for everything does not; it is exempt."""
    return any(
        driver in rule.get("apiGroups", ()) and MARK_VERB in rule.get("verbs", ())
        for rule in role.get("rules") or ()
    )
