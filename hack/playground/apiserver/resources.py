"""The resources of the playground's API server: their request paths and discovery documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from playground.apiserver.failure import path_not_found

RESOURCE_GROUP = "resource.k8s.io"
RESOURCE_VERSIONS = ("v1",)
_VERSION_INFO = {
    "major": "1", "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "",
    "platform": "linux/amd64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object. `has_status` means that it has a status subresource."""

    group: str
    plural: str
    kind: str
    namespaced: bool
    has_status: bool = False
    short_names: tuple[str, ...] = ()


RESOURCES = (
    Resource("", "namespaces", "Namespace", namespaced=False, has_status=True, short_names=("ns",)),
    Resource("", "nodes", "Node", namespaced=False, has_status=True, short_names=("no",)),
    Resource("", "pods", "Pod", namespaced=True, has_status=True, short_names=("po",)),
    Resource("", "events", "Event", namespaced=True, short_names=("ev",)),
    Resource("", "serviceaccounts", "ServiceAccount", namespaced=True, short_names=("sa",)),
    Resource("", "configmaps", "ConfigMap", namespaced=True, short_names=("cm",)),
    Resource("batch", "jobs", "Job", namespaced=True, has_status=True),
    Resource(RESOURCE_GROUP, "resourceslices", "ResourceSlice", namespaced=False),
    Resource(RESOURCE_GROUP, "resourceclaims", "ResourceClaim", namespaced=True, has_status=True),
    Resource(RESOURCE_GROUP, "resourceclaimtemplates", "ResourceClaimTemplate", namespaced=True),
    Resource(RESOURCE_GROUP, "deviceclasses", "DeviceClass", namespaced=False),
)
BY_PLURAL = {(resource.group, resource.plural): resource for resource in RESOURCES}


@dataclass(frozen=True, slots=True)
class Route:
    """A parsed path. `name` is None for a collection; `namespace` is None for all namespaces."""

    resource: Resource
    version: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.resource.group}/{self.version}" if self.resource.group else self.version

    def shown(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return a stored object as a response has it, not as a copy. Versions differ only in `apiVersion` here."""
        shown = {"kind": self.resource.kind, "apiVersion": self.api_version}
        return shown | {key: value for key, value in stored.items() if key not in shown}


def parse_path(path: str, served: tuple[str, ...]) -> Route:
    """Return the route of a percent-encoded API path. Raises: ApiFailure 404 if this server does not serve the path."""
    parts = [unquote(part) for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise path_not_found()
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2 and not (group == "" and rest[2] in ("status", "finalize")):
        namespace, rest = rest[1], rest[2:]
    resource = BY_PLURAL.get((group, rest[0]))
    if resource is None or len(rest) > 3 or (namespace is not None) > resource.namespaced:
        raise path_not_found()
    if version not in _versions(group, served):
        raise path_not_found()
    route = Route(resource, version, namespace)
    route = replace(route, name=rest[1] if len(rest) > 1 else None)
    if len(rest) == 3:
        if rest[2] != "status" or not resource.has_status:
            raise path_not_found()
        route = replace(route, subresource="status")
    if resource.namespaced and route.name is not None and namespace is None:
        raise path_not_found()
    return route


def document(path: str, served: tuple[str, ...], minor: int) -> dict[str, Any] | None:
    """Return the discovery document at a path, as in Kubernetes 1.`minor`; None if the path has none."""
    groups = {group: _group(group, served) for group in ("batch", RESOURCE_GROUP) if _versions(group, served)}
    match [part for part in path.split("/") if part]:
        case ["version"]:
            return {**_VERSION_INFO, "minor": str(minor), "gitVersion": f"v1.{minor}.0-playground"}
        case ["api"]:
            return {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]}
        case ["api", "v1"]:
            return _resource_list("", "v1")
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(groups.values())}
        case ["apis", group] if group in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **groups[group]}
        case ["apis", group, version] if group in groups and version in _versions(group, served):
            return _resource_list(group, version)
        case ["openapi", "v3"]:
            full = [one["groupVersion"] for group in groups.values() for one in group["versions"]]
            paths = ["api/v1", *(f"apis/{one}" for one in full)]
            return {"paths": {entry: {"serverRelativeURL": f"/openapi/v3/{entry}"} for entry in paths}}
        case ["openapi", "v3", "api", "v1"]:
            return _schema("", "v1")
        case ["openapi", "v3", "apis", group, version] if group in groups:
            return _schema(group, version)
    return None


def _versions(group: str, served: tuple[str, ...]) -> tuple[str, ...]:
    return served if group == RESOURCE_GROUP else ("v1",)


def _group(group: str, served: tuple[str, ...]) -> dict[str, Any]:
    versions = [{"groupVersion": f"{group}/{one}", "version": one} for one in _versions(group, served)]
    return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _schema(group: str, version: str) -> dict[str, Any]:
    """Return the parts of an OpenAPI document that `kubectl apply` needs for validation on the server."""
    patches = {
        f"/{resource.plural}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": version,
                    "kind": resource.kind,
                },
                "parameters": [{"name": "fieldValidation", "in": "query"}],
            }
        }
        for resource in RESOURCES
        if resource.group == group
    }
    return {"openapi": "3.0.0", "info": {"title": "playground", "version": version}, "paths": patches}


def _resource_list(group: str, version: str) -> dict[str, Any]:
    found = [entry for resource in RESOURCES if resource.group == group for entry in _entries(resource)]
    full = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": full, "resources": found}


def _entries(resource: Resource) -> list[dict[str, Any]]:
    main: dict[str, Any] = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
    }
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    if not resource.has_status:
        return [main]
    status = main | {"name": f"{resource.plural}/status", "singularName": ""}
    status.pop("shortNames", None)
    return [main, status | {"verbs": ["get", "patch", "update"]}]
