"""The resources that the playground's API server knows, and the parts of a request path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import unquote

from playground.apiserver.failure import path_not_found

RESOURCE_GROUP = "resource.k8s.io"
RESOURCE_VERSIONS = ("v1", "v1beta2", "v1beta1")


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object. `has_status` means a status subresource of its own."""

    group: str
    plural: str
    kind: str
    namespaced: bool
    has_status: bool = False
    short_names: tuple[str, ...] = ()
    version: str = "v1"  # of its group, where only one is served

    @property
    def verbs(self) -> tuple[str, ...]:
        """What discovery announces."""
        return ("create", "delete", "get", "list", "patch", "update", "watch")


RESOURCES = (
    Resource("", "namespaces", "Namespace", namespaced=False, has_status=True, short_names=("ns",)),
    Resource("", "nodes", "Node", namespaced=False, has_status=True, short_names=("no",)),
    Resource("", "pods", "Pod", namespaced=True, has_status=True, short_names=("po",)),
    Resource("", "events", "Event", namespaced=True, short_names=("ev",)),
    Resource("", "serviceaccounts", "ServiceAccount", namespaced=True, short_names=("sa",)),
    Resource("", "configmaps", "ConfigMap", namespaced=True, short_names=("cm",)),
    Resource("events.k8s.io", "events", "Event", namespaced=True),
    Resource(RESOURCE_GROUP, "resourceslices", "ResourceSlice", namespaced=False),
    Resource(RESOURCE_GROUP, "resourceclaims", "ResourceClaim", namespaced=True, has_status=True),
    Resource(RESOURCE_GROUP, "resourceclaimtemplates", "ResourceClaimTemplate", namespaced=True),
    Resource(RESOURCE_GROUP, "deviceclasses", "DeviceClass", namespaced=False),
)
BY_PLURAL = {(resource.group, resource.plural): resource for resource in RESOURCES}


@dataclass(frozen=True, slots=True)
class Route:
    """A parsed path: `name` is None for a collection, `namespace` None across all namespaces."""

    resource: Resource
    version: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None


def parse_path(path: str, served: tuple[str, ...]) -> Route:
    """The route of an API path, its segments still quoted. Raises: ApiFailure 404 if this server does not serve it."""
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
    if version not in (served if group == RESOURCE_GROUP else (resource.version,)):
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
