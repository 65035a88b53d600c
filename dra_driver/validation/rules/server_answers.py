"""What the API server's answers to dry runs mean, each as one sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

JsonObject = dict[str, Any]
Outcome = Literal["accepted", "refused", "waits", "not asked"]

_POLICY = re.compile(
    r"ValidatingAdmissionPolicy '(?P<name>[^']*)' with binding '[^']*' denied request: (?P<text>.*)"
)
_WEBHOOK = re.compile(r'admission webhook "(?P<name>[^"]*)" denied the request:? ?(?P<text>.*)')
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.*?), used: (?P<used>.*?), limited: (?P<most>.*)"
)
_SECURITY = re.compile(r'violates PodSecurity "(?P<name>[^"]*)": (?P<text>.*)')
_SCHEMA = re.compile(r"strict decoding error: (?P<text>.*)")
_INVALID = re.compile(r'"[^"]*" is invalid: (?P<text>.*)')
_FORBIDDEN = re.compile(r'"[^"]*" is forbidden: (?P<text>.*)')
_NO_RIGHT = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_ABSENT = (
    re.compile(r'(?P<kind>[A-Za-z]+)(?:\.[\w.-]+)? "(?P<name>[^"]+)" not found'),
    re.compile(r"no (?P<kind>PriorityClass) with name (?P<name>\S+) was found"),
)
_HTTP = re.compile(r" \(HTTP \d+\)\Z")
_UNAUTHORIZED = 401


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server makes of one document.

    `outcome` is "waits" where it can only tell once another document of the files is there, and "not asked" where it
    could not be asked; `text` says why, and of what it refused. `warnings` are the server's own.
    """

    outcome: Outcome
    text: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """An object that one of the files has; `place` is `claims.yaml:12`."""

    kind: str
    name: str
    place: str
    content: JsonObject

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.place})"


def refused(message: str, status: int, made: Sequence[Made]) -> Answer:
    """The answer to a document that the server did not take; `made` are the other documents."""
    message = _HTTP.sub("", message)
    right = _NO_RIGHT.search(message) if status == 403 else None
    if right is not None:
        resource = f"{right['resource']}.{right['group']}" if right["group"] else right["resource"]
        where = f" in namespace {right['namespace']}" if right["namespace"] else ""
        return Answer("not asked", f"this user may not {right['verb']} {resource}{where}")
    if status == _UNAUTHORIZED:
        return Answer("not asked", "it does not accept this user's credentials")
    absent = next((found for pattern in _ABSENT for found in pattern.finditer(message)), None)
    if absent is not None:
        needed = _among(made, absent["kind"], absent["name"])
        if needed is not None:
            return Answer("waits", f"needs {needed}, which is not in the cluster yet")
        if absent["kind"] == "namespaces":
            return Answer(
                "refused", f"the cluster has no namespace {absent['name']}, and the files have none"
            )
    return Answer("refused", refusal_text(message))


def unknown_kind(kind: str, version: str, served: Sequence[str], made: Sequence[Made]) -> Answer:
    """The answer to a document of a kind that the server does not serve in this version. `served` are versions of its
    group."""
    group = version.rpartition("/")[0]
    for one in made:
        spec = one.content.get("spec")
        if one.kind == "CustomResourceDefinition" and isinstance(spec, dict) and spec.get("group") == group:
            names = spec.get("names")
            if isinstance(names, dict) and names.get("kind") == kind:
                return Answer("waits", f"needs {one}, which is not in the cluster yet")
    if served and version not in served:
        return Answer("refused", f"it has no {version}; of this group it has {', '.join(served)}")
    return Answer("refused", f"it has no kind {kind} of {version}; install what brings it, or correct both")


def refusal_text(message: str) -> str:
    """Who refuses, and why."""
    policy, webhook = _POLICY.search(message), _WEBHOOK.search(message)
    if policy is not None:
        return f"the policy {policy['name']} refuses it: {policy['text']}"
    if webhook is not None:
        return f"the webhook {webhook['name']} refuses it: {webhook['text'] or 'it gives no reason'}"
    quota, security = _QUOTA.search(message), _SECURITY.search(message)
    if quota is not None:
        return (
            f"the quota {quota['name']} has no room for it: it asks for {quota['asked']}, "
            f"used are {quota['used']} of {quota['most']}"
        )
    if security is not None:
        return f"the Pod Security level {security['name']} refuses it: {security['text']}"
    for pattern, who in ((_SCHEMA, "its schema refuses it"), (_INVALID, "it is not valid")):
        found = pattern.search(message)
        if found is not None:
            return f"{who}: {found['text']}"
    forbidden = _FORBIDDEN.search(message)
    return f"refused: {forbidden['text'] if forbidden is not None else message}"


def _among(made: Sequence[Made], kind: str, name: str) -> Made | None:
    """The document that makes what an answer says is absent; there a kind may be written as a resource."""
    for one in made:
        lower = one.kind.lower()
        if one.name == name and kind.lower() in (lower, f"{lower}s", f"{lower}es"):
            return one
    return None
