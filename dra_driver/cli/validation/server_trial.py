"""Asks the API server what it would make of documents: each is created by dry run, which stores nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.rules.manifests import is_parameters
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import JSON, ApiClient, is_not_found, path_segment
from dra_driver.kube.endpoint import Endpoint
from dra_driver.model.schema import JsonObject

Outcome = Literal["accepted", "refused", "waits", "not asked"]

_NO_RIGHT = re.compile(r"cannot \w+ resource ")
_ABSENT = (
    re.compile(r'(?P<kind>[A-Za-z]+)(?:\.[\w.-]+)? "(?P<name>[^"]+)" not found'),
    re.compile(r"no (?P<kind>PriorityClass) with name (?P<name>\S+) was found"),
)
_HTTP = re.compile(r" \(HTTP \d+\)\Z")
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server makes of one document.

    `outcome` is "waits" where it can only say it once another document of the files is there, and "not asked" where it
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
    if status == _UNAUTHORIZED or (status == _FORBIDDEN and _NO_RIGHT.search(message)):
        return Answer("not asked", message)
    absent = next((found for pattern in _ABSENT for found in pattern.finditer(message)), None)
    needed = None if absent is None else _among(made, absent["kind"], absent["name"])
    if needed is not None:
        return Answer("waits", f"needs {needed}, which is not in the cluster yet")
    return Answer("refused", message)


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


def _among(made: Sequence[Made], kind: str, name: str) -> Made | None:
    """The document that makes what an answer says is absent; there a kind may be written as a resource."""
    for one in made:
        lower = one.kind.lower()
        if one.name == name and kind.lower() in (lower, f"{lower}s", f"{lower}es"):
            return one
    return None


Reference = tuple[str, str, str]
"""Kind, namespace and name of a claim or a template."""

_APPLY: Final = "application/apply-patch+yaml"
_ACTION = "try it"
_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "gpu-dra-driver-validate"}
_SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
_PLURALS = {"ResourceClaim": "resourceclaims", "ResourceClaimTemplate": "resourceclaimtemplates"}
_TIMEOUT_S = 15.0


@dataclass(slots=True)
class ServerFindings:
    """What an API server said. `answers` are by the number of the document; `problem` is why it could not be asked at
    all, or not to the end.

    `classes` are the DeviceClasses of the cluster, None if they are not known; `found` are claims and templates that
    pods name and no file has, None if the cluster has none of that name.
    """

    server: str
    answers: dict[int, Answer] = field(default_factory=dict)
    problem: str | None = None
    classes: list[JsonObject] | None = None
    found: dict[Reference, JsonObject | None] = field(default_factory=dict)


class ServerTrial:
    """One API server."""

    def __init__(self, endpoint: Endpoint, namespace: str) -> None:
        """`namespace` is that of documents that name none."""
        self._warnings: list[str] = []
        self._client = ApiClient(endpoint, timeout_s=_TIMEOUT_S, warned=self._warnings.append)
        self._namespace = namespace
        self._kinds: dict[str, Mapping[str, JsonObject] | None] = {}
        self._server = endpoint.server

    def findings(self, documents: Sequence[Document], wanted: Sequence[Reference]) -> ServerFindings:
        """About all documents that are objects of the API server, and the claims and templates `wanted`."""
        found = ServerFindings(self._server)
        try:
            self._client.request("GET", "/version", action=_ACTION)
        except (ApiUnavailableError, ApiRejectedError) as error:
            found.problem = _plain(error)
            return found
        made = [_made(document) for document in documents]
        try:
            for number, document in enumerate(documents):
                if is_object(document):
                    others = [one for index, one in enumerate(made) if one is not None and index != number]
                    found.answers[number] = self._answer(document.content, others)
                elif _lacks_kind(document):
                    found.answers[number] = Answer("refused", "it needs an apiVersion and a kind")
            found.classes = self._classes()
            for reference in wanted:
                found.found |= self._lookup(reference)
        except ApiUnavailableError as error:
            found.problem = _plain(error)
        return found

    def _answer(self, content: JsonObject, others: Sequence[Made]) -> Answer:
        """Raises: ApiUnavailableError if nothing more can be asked."""
        self._warnings.clear()
        try:
            answer = self._tried(content, others)
        except ApiRejectedError as error:
            answer = refused(_plain(error), error.status, others)
        except ApiUnavailableError as error:
            # A webhook that does not answer is an error of the server too, and concerns this document alone.
            self._client.request("GET", "/version", action=_ACTION)
            answer = Answer("not asked", _plain(error))
        return replace(answer, warnings=tuple(dict.fromkeys(self._warnings)))

    def _tried(self, content: JsonObject, others: Sequence[Made]) -> Answer:
        version, kind = str(content.get("apiVersion")), str(content.get("kind"))
        kinds = self._kinds_of(version)
        resource = None if kinds is None else kinds.get(kind)
        if resource is None:
            return unknown_kind(kind, version, self._served(version), others)
        metadata = content.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        body = {
            **content,
            "metadata": {name: value for name, value in metadata.items() if name not in _SET_BY_SERVER},
        }
        path = _group_path(version)
        if resource["namespaced"]:
            path += f"/namespaces/{path_segment(str(metadata.get('namespace') or self._namespace))}"
        path += f"/{resource['name']}"
        named = f"{path}/{path_segment(str(metadata['name']))}" if metadata.get("name") else None
        # As a new object it would also be counted against quotas a second time.
        if named is not None and self._exists(named):
            return self._changed(named, body, others)
        try:
            self._send("POST", path, body, JSON)
        except ApiRejectedError as error:
            if error.status != 409 or error.reason != "AlreadyExists" or named is None:
                raise
            return self._changed(named, body, others)
        return Answer("accepted")

    def _exists(self, path: str) -> bool:
        """Whether there is such an object; False too if this user may not look."""
        try:
            self._client.request("GET", path, action=_ACTION)
        except ApiRejectedError as error:
            if error.status not in (401, 403, 404):
                raise
            return False
        return True

    def _changed(self, path: str, body: JsonObject, others: Sequence[Made]) -> Answer:
        try:
            self._send("PATCH", path, body, _APPLY)
        except ApiRejectedError as error:
            answer = refused(_plain(error), error.status, others)
            if answer.outcome == "not asked":
                return Answer("not asked", f"it exists already, and {answer.text}")
            return replace(answer, text=f"it exists already, and as a change of that: {answer.text}")
        return Answer("accepted", "it exists already")

    def _send(self, method: str, path: str, body: JsonObject, content_type: str) -> None:
        query = _DRY_RUN | ({"force": "true"} if method == "PATCH" else {})
        self._client.request(method, path, action=_ACTION, query=query, body=body, content_type=content_type)

    def _kinds_of(self, version: str) -> Mapping[str, JsonObject] | None:
        """The resources of one version of a group by kind; None if the server does not serve it."""
        if version not in self._kinds:
            try:
                answer = self._client.request("GET", _group_path(version), action=_ACTION)
            except ApiRejectedError as error:
                if error.status != 404:
                    raise
                self._kinds[version] = None
            else:
                self._kinds[version] = {
                    entry["kind"]: entry
                    for entry in answer.get("resources") or ()
                    if "/" not in entry["name"]
                }
        return self._kinds[version]

    def _served(self, version: str) -> list[str]:
        """The versions that the server has of the group, best first."""
        group, slash, _ = version.partition("/")
        if not slash:
            return ["v1"]
        try:
            answer = self._client.request("GET", f"/apis/{path_segment(group)}", action=_ACTION)
        except ApiRejectedError:
            return []
        return [str(entry.get("groupVersion")) for entry in answer.get("versions") or ()]

    def _classes(self) -> list[JsonObject] | None:
        try:
            return list(
                self._client.call("GET", "deviceclasses", action="list device classes").get("items") or ()
            )
        except ApiRejectedError:
            return None

    def _lookup(self, reference: Reference) -> dict[Reference, JsonObject | None]:
        """The object, None if there is none; nothing if this user may not look."""
        kind, namespace, name = reference
        try:
            found = self._client.call(
                "GET", _PLURALS[kind], action=f"get {kind} {namespace}/{name}", namespace=namespace, name=name
            )
        except ApiRejectedError as error:
            return {reference: None} if is_not_found(error) else {}
        return {reference: {"kind": kind, "apiVersion": "resource.k8s.io/v1", **found}}


def is_object(document: Document) -> bool:
    """Whether a document is for the API server: neither a configuration file of ours nor parameters alone."""
    content = document.content
    return (
        document.problem is None
        and isinstance(content, dict)
        and isinstance(content.get("kind"), str)
        and isinstance(content.get("apiVersion"), str)
        and not is_parameters(content)
    )


def _lacks_kind(document: Document) -> bool:
    content = document.content
    return (
        isinstance(content, dict)
        and ("kind" in content or "apiVersion" in content)
        and not is_parameters(content)
    )


def _plain(error: ApiUnavailableError | ApiRejectedError) -> str:
    """The server's own words, without what was tried."""
    return str(error).removeprefix(f"{_ACTION}: ")


def _made(document: Document) -> Made | None:
    if not is_object(document):
        return None
    metadata = document.content.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return (
        None if name is None else Made(document.content["kind"], str(name), document.place, document.content)
    )


def _group_path(version: str) -> str:
    parts = [path_segment(part) for part in version.split("/")]
    return f"/{'apis' if len(parts) > 1 else 'api'}/{'/'.join(parts)}"
