"""Whole lists of a cluster, page by page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dra_driver.errors import ApiRejectedError, FatalError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.versions import ResourceApi

JsonObject = dict[str, Any]

_PAGE = "500"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_AGAIN = 410
"""A list took so long that the server forgot how it looked at its beginning."""


@dataclass(frozen=True, slots=True)
class ClusterLists:
    """Slices, claims and classes in v1 shape; `pods` is the metadata of all pods."""

    slices: list[JsonObject]
    claims: list[JsonObject]
    classes: list[JsonObject]
    pods: list[JsonObject]


def read_cluster(endpoint: Endpoint, driver: str, *, with_pods: bool, timeout_s: float) -> ClusterLists:
    """Everything that concerns the driver. Pods are large, so only their metadata is asked for, and only on demand.

    Raises: FatalError that names a right that is missing; ApiUnavailableError, ApiRejectedError.
    """
    client = ApiClient(endpoint, timeout_s=timeout_s)
    api = ResourceApi(client)

    def resources(plural: str, **query: str) -> list[JsonObject]:
        return _pages(
            plural,
            lambda more: api.call("GET", plural, action=f"list {plural}", query={**query, **more}),
        )

    slices = resources("resourceslices", fieldSelector=f"spec.driver={driver}")
    claims, classes = resources("resourceclaims"), resources("deviceclasses")
    pods: list[JsonObject] = []
    if with_pods:
        light = ApiClient(endpoint, timeout_s=timeout_s, headers={"Accept": _METADATA})
        pods = _pages(
            "pods", lambda more: light.request("GET", "/api/v1/pods", action="list pods", query=more)
        )
    return ClusterLists(slices, claims, classes, [pod["metadata"] for pod in pods])


def _pages(plural: str, page: Callable[[dict[str, str]], JsonObject]) -> list[JsonObject]:
    for is_last_try in (False, True):
        found: list[JsonObject] = []
        more: dict[str, str] = {}
        try:
            while True:
                answer = page({"limit": _PAGE, **more})
                found += answer.get("items") or ()
                token = (answer.get("metadata") or {}).get("continue")
                if not token:
                    return found
                more = {"continue": token}
        except ApiRejectedError as error:
            if error.status in (401, 403):
                raise FatalError(
                    f"this user may not list {plural} of all namespaces; ask for a ClusterRole that allows it"
                ) from error
            if error.status != _AGAIN or is_last_try:
                raise
    return found
