"""Whole lists of a cluster, page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dra_driver.errors import ApiRejectedError, FatalError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.versions import ResourceApi

JsonObject = dict[str, Any]

_PAGE = "500"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_UNSCHEDULED = "spec.nodeName=,status.phase=Pending"
_FORGOTTEN = 410
"""A list took so long that the server forgot how it looked at its beginning."""

_Page = Callable[[dict[str, str]], JsonObject]
"""The answer to one request of a list, with that query."""


@dataclass(frozen=True, slots=True)
class ClusterLists:
    """Slices, claims and classes in v1 shape; `owners` is the metadata of all pods, `waiting` the pods without a node.
    `lacking` are the rights that are missing, and without which something cannot be told."""

    slices: list[JsonObject]
    claims: list[JsonObject]
    classes: list[JsonObject]
    owners: list[JsonObject] = field(default_factory=list)
    waiting: list[JsonObject] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


class ClusterReader:
    """Reads all that concerns one driver, as often as it is asked to."""

    def __init__(self, endpoint: Endpoint, driver: str, *, timeout_s: float) -> None:
        client = ApiClient(endpoint, timeout_s=timeout_s)
        self._api = ResourceApi(client)
        self._client = client
        # Pods are large; of those that run, the metadata says who owns them.
        self._owners = ApiClient(endpoint, timeout_s=timeout_s, headers={"Accept": _METADATA})
        self._driver = driver

    def read(self, *, with_owners: bool) -> ClusterLists:
        """Raises: FatalError that names the right that is missing; ApiUnavailableError, ApiRejectedError."""
        slices = self._resources("resourceslices", fieldSelector=f"spec.driver={self._driver}")
        found = ClusterLists(slices, self._resources("resourceclaims"), self._resources("deviceclasses"))
        if with_owners:
            found.owners.extend(pod["metadata"] for pod in _all("pods", _pods_of(self._owners), {}))
        try:
            pods = _all("pods", _pods_of(self._client), {"fieldSelector": _UNSCHEDULED})
            found.waiting.extend(map(_slim, pods))
        except FatalError as error:
            found.lacking.append(str(error))
        return found

    def _resources(self, plural: str, **query: str) -> list[JsonObject]:
        def page(query: dict[str, str]) -> JsonObject:
            answer = self._api.call("GET", plural, action=f"list {plural}", query=query)
            if plural == "resourceslices":
                for entry in answer.get("items") or ():
                    _share_parts(entry, parts)
            return answer

        parts: dict[str, Any] = {}
        return [_slim(entry) for entry in _all(f"{plural}.resource.k8s.io", page, query)]


def _pods_of(client: ApiClient) -> _Page:
    return lambda query: client.request("GET", "/api/v1/pods", action="list pods", query=query)


def _share_parts(entry: JsonObject, parts: dict[str, Any]) -> None:
    """Equal parts of devices become one object: nodes of one kind differ in little but their UUIDs, and thousands of
    them have to fit in memory."""
    for device in (entry.get("spec") or {}).get("devices") or ():
        for name in ("capacity", "taints"):
            if name in device:
                device[name] = parts.setdefault(repr(device[name]), device[name])
        for one in device.get("consumesCounters") or ():
            one["counters"] = parts.setdefault(repr(one["counters"]), one["counters"])
        attributes = device.get("attributes") or {}
        for name, value in attributes.items():
            attributes[name] = parts.setdefault(repr(value), value)


def _slim(entry: JsonObject) -> JsonObject:
    """Without the record of who wrote which field, which can be longer than the rest."""
    (entry.get("metadata") or {}).pop("managedFields", None)
    return entry


def _all(resource: str, page: _Page, query: dict[str, str]) -> list[JsonObject]:
    """Page by page; in one piece if the server forgets the beginning of the list before its end is read."""
    try:
        return list(_paged(page, query))
    except ApiRejectedError as error:
        if error.status in (401, 403):
            raise FatalError(
                f"this user may not list {resource} in all namespaces; "
                f"ask for a ClusterRole with the verb list for {resource}"
            ) from error
        if error.status != _FORGOTTEN:
            raise
    return list(page(query).get("items") or ())


def _paged(page: _Page, query: dict[str, str]) -> Iterator[JsonObject]:
    more: dict[str, str] = {}
    while True:
        answer = page({**query, "limit": _PAGE, **more})
        yield from answer.get("items") or ()
        token = (answer.get("metadata") or {}).get("continue")
        if not token:
            return
        more = {"continue": token}
