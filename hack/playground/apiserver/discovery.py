"""Discovery documents, in the plain form that every client falls back to."""

from __future__ import annotations

from typing import Any

from playground.apiserver.resources import RESOURCE_GROUP, RESOURCES, Resource

_VERSION_INFO = {
    "major": "1", "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "",
    "platform": "linux/amd64",
}  # fmt: skip


def document(path: str, served: tuple[str, ...], minor: int) -> dict[str, Any] | None:
    """The discovery document at a path of Kubernetes 1.`minor`, None if there is none there."""
    parts = [part for part in path.split("/") if part]
    match parts:
        case ["version"]:
            return {**_VERSION_INFO, "minor": str(minor), "gitVersion": f"v1.{minor}.0-playground"}
        case ["api"]:
            return {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]}
        case ["api", "v1"]:
            return _resource_list("", "v1")
        case ["apis"]:
            groups = [_group(name, served) for name in _groups(served)]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group] if group in _groups(served):
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, served)
        case ["apis", group, version] if group in _groups(served) and version in _versions(group, served):
            return _resource_list(group, version)
        case ["openapi", "v3"]:
            paths = [
                "api/v1",
                *(f"apis/{name}/{v}" for name in _groups(served) for v in _versions(name, served)),
            ]
            return {"paths": {entry: {"serverRelativeURL": f"/openapi/v3/{entry}"} for entry in paths}}
        case ["openapi", "v3", "api", "v1"]:
            return _schema("", "v1")
        case ["openapi", "v3", "apis", group, version] if group in _groups(served):
            return _schema(group, version)
    return None


def _schema(group: str, version: str) -> dict[str, Any]:
    """As much of an OpenAPI document as `kubectl apply` looks for: it leaves validation to this server."""
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


def _groups(served: tuple[str, ...]) -> list[str]:
    names = {resource.group for resource in RESOURCES if resource.group}
    return sorted(names if served else names - {RESOURCE_GROUP})


def _versions(group: str, served: tuple[str, ...]) -> tuple[str, ...]:
    return served if group == RESOURCE_GROUP else ("v1",)


def _group(name: str, served: tuple[str, ...]) -> dict[str, Any]:
    versions = [{"groupVersion": f"{name}/{v}", "version": v} for v in _versions(name, served)]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


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
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    if not resource.has_status:
        return [main]
    status = main | {"name": f"{resource.plural}/status", "singularName": ""}
    status.pop("shortNames", None)
    return [main, status | {"verbs": ["get", "patch", "update"]}]
