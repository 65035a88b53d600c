"""What a cluster has that concerns one driver: lists, page by page, of each object only what a look at it needs."""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.base.backoff import Backoff
from dra_driver.cli.plugin_metrics import read_loads
from dra_driver.cli.rules.cluster_usage import plugin_pod
from dra_driver.cli.rules.cluster_view import workload_of
from dra_driver.cli.rules.readable import as_object, unreadable
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, FatalError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.resource_api import ResourceApi
from dra_driver.model.claim import allocation_results
from dra_driver.model.gpu import GpuLoad
from dra_driver.model.schema import JsonObject

Key = tuple[str, str]
"""Namespace and name."""

_PAGE = 500
_PAGE_OF_SLICES = 100
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_UNSCHEDULED = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
_PLUGINS = {"labelSelector": "app.kubernetes.io/component=node"}
_FORGOTTEN = 410
"""A list took so long that the server forgot how it looked at its beginning."""
_BACKOFF_S = (1.6, 30.0)
_LIST_S = 600.0
"""How long a list may take. With the server's pages that is more than any cluster needs."""
_PATIENCE_S = 60.0
"""How long a page is waited for that the API server is too busy to send."""


@dataclass(frozen=True, slots=True)
class ClusterLists:
    """Slices, claims and classes in v1 shape; `workloads` has that of each pod, `waiting` the pods without a node.
    `lacking` are the rights that are missing, without which something is not known; `unreadable` says which
    objects were left out, and why. `loads` has the load of each device of a claim, by pool and device name, None if
    nobody asked for that; `unmeasured` says which loads are not known, and why."""

    slices: list[JsonObject]
    claims: list[JsonObject]
    classes: list[JsonObject]
    workloads: dict[Key, str]
    waiting: list[JsonObject]
    lacking: list[str]
    unreadable: list[str]
    loads: dict[Key, GpuLoad] | None = None
    unmeasured: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _List:
    """A resource to list: `page` makes one request with that query; `keep` returns what is kept of an object."""

    name: str
    resource: str
    kind: str
    page: Callable[[dict[str, str]], JsonObject]
    keep: Callable[[JsonObject], Any]
    limit: int = _PAGE

    def read(self, left_out: dict[str, None]) -> dict[Key, Any]:
        """All; in one piece, after a wait, if the server forgets the beginning of the list before its end is read. What
        cannot be read goes to `left_out`, with the reason.

        Raises: FatalError that names the right that is missing; ApiUnavailableError, ApiRejectedError.
        """
        backoff = Backoff(*_BACKOFF_S, spread=(0.5, 1.0))
        try:
            return self._read({"limit": str(self.limit)}, left_out, backoff)
        except ApiRejectedError as error:
            if error.status == 401:
                raise FatalError(
                    "the API server does not accept these credentials; they may have expired: log in anew"
                ) from error
            if error.status == 403:
                raise FatalError(
                    f"this user may not list {self.resource} in all namespaces; "
                    f"ask for a ClusterRole with the verb list for {self.resource}"
                ) from error
            if error.status != _FORGOTTEN:
                raise
        time.sleep(backoff.next())
        return self._read({}, left_out, backoff)

    def _read(self, query: dict[str, str], left_out: dict[str, None], backoff: Backoff) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        more: dict[str, str] = {}
        tokens: set[str] = set()
        end = time.monotonic() + _LIST_S
        while True:
            answer = self._page(query | more, backoff)
            entries = answer.get("items", ())
            if not (isinstance(entries, list) or (entries is None and "items" in answer)):
                raise ApiUnavailableError(f"list {self.name}: the answer has no list of {self.name} in it")
            for entry in entries or ():
                why = unreadable(self.kind, entry)
                if why is None:
                    found[_key(entry)] = self.keep(entry)
                else:
                    left_out[why] = None
            following = as_object(answer.get("metadata")).get("continue")
            if not following:
                return found
            token = str(following)
            if token in tokens:
                raise ApiUnavailableError(
                    f"list {self.name}: the API server begins a page for the second time"
                )
            if time.monotonic() > end:
                raise ApiUnavailableError(f"list {self.name}: there is no last page after {_LIST_S:g} s")
            tokens.add(token)
            more = {"continue": token}

    def _page(self, query: dict[str, str], backoff: Backoff) -> JsonObject:
        """One request, made again for as long as the API server asks to come back later."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self.page(query)
            except ApiUnavailableError as error:
                wait_s = backoff.next(error.retry_after_s)
                if error.retry_after_s is None or time.monotonic() + wait_s > end:
                    raise
            time.sleep(wait_s)


def read_cluster(
    endpoint: Endpoint, driver: str, *, timeout_s: float, with_owners: bool, with_usage: bool = False
) -> ClusterLists:
    """All lists that concern one driver; with `with_owners` those of all pods too, for their workloads; with
    `with_usage` the metrics of its plugins too.

    Raises: FatalError that names the right that is missing; ApiUnavailableError, ApiRejectedError.
    """
    client = ApiClient(endpoint, timeout_s=timeout_s)
    api = ResourceApi(client)
    left_out: dict[str, None] = {}  # a pod that waits is on two lists

    def of_group(
        plural: str, kind: str, keep: Callable[[JsonObject], JsonObject], **query: str
    ) -> list[JsonObject]:
        limit = _PAGE_OF_SLICES if kind == "ResourceSlice" else _PAGE
        listed = _List(
            plural,
            f"{plural}.resource.k8s.io",
            kind,
            lambda more: api.call("GET", plural, action=f"list {plural}", query=query | more),
            keep,
            limit,
        )
        return [*listed.read(left_out).values()]

    def pods(client: ApiClient, keep: Callable[[JsonObject], Any], query: dict[str, str]) -> dict[Key, Any]:
        def page(more: dict[str, str]) -> JsonObject:
            return client.request("GET", "/api/v1/pods", action="list pods", query=query | more)

        return _List("pods", "pods", "Pod", page, keep).read(left_out)

    slices = of_group("resourceslices", "ResourceSlice", _Shared(), fieldSelector=f"spec.driver={driver}")
    claims = of_group("resourceclaims", "ResourceClaim", lambda claim: _kept_claim(claim, driver))
    classes = of_group("deviceclasses", "DeviceClass", _slim)
    workloads: dict[Key, str] = {}
    if with_owners:
        # Pods are large; of those that run, the metadata says who owns them.
        only = ApiClient(endpoint, timeout_s=timeout_s, headers={"Accept": _METADATA})
        workloads = pods(only, lambda pod: workload_of(pod["metadata"]), {})
    waiting: list[JsonObject] = []
    lacking: list[str] = []
    try:
        waiting = [*pods(client, _slim, _UNSCHEDULED).values()]
    except FatalError as error:
        lacking.append(str(error))
    loads: dict[Key, GpuLoad] | None = None
    unmeasured: Sequence[str] = ()
    if with_usage:
        plugins = pods(client, lambda pod: plugin_pod(pod, driver), _PLUGINS)
        loads, unmeasured = read_loads(client, [pod for pod in plugins.values() if pod is not None], driver)
    return ClusterLists(slices, claims, classes, workloads, waiting, lacking, [*left_out], loads, unmeasured)


def _key(entry: Any) -> Key:
    metadata = as_object(as_object(entry).get("metadata"))
    return str(metadata.get("namespace") or ""), str(metadata.get("name"))


def _slim(entry: JsonObject) -> JsonObject:
    """Without the record of who wrote which field, which can be longer than the rest."""
    (entry.get("metadata") or {}).pop("managedFields", None)
    return entry


class _Shared:
    """Of slices, equal parts of devices once: nodes of one kind differ in little, and have many MIG devices on demand
    (a DGX H100 has 208)."""

    def __init__(self) -> None:
        self._known: dict[bytes, JsonObject] = {}

    def __call__(self, entry: JsonObject) -> JsonObject:
        """The slice, changed in place."""
        for device in entry["spec"].get("devices") or ():
            if device.get("capacity"):
                device["capacity"] = self._one(device["capacity"])
            for use in device.get("consumesCounters") or ():
                use["counters"] = self._one(use["counters"])
            attributes = device.get("attributes") or {}
            for name in attributes:
                attributes[name] = self._one(attributes[name])
        return _slim(entry)

    def _one(self, part: JsonObject) -> JsonObject:
        return self._known.setdefault(marshal.dumps(part, 2), part)


def _kept_claim(claim: JsonObject, driver: str) -> JsonObject:
    """Of a claim that has its devices, who has which; all of one that waits."""
    status = claim.get("status") or {}
    if not status.get("allocation"):
        return _slim(claim)
    metadata = claim["metadata"]
    results = [
        {name: value for name, value in result.items() if name not in ("driver", "tolerations", "request")}
        | {"driver": driver}
        for result in allocation_results(claim)
        if result.get("driver") == driver
    ]
    return {
        "metadata": {name: metadata[name] for name in ("namespace", "name", "uid") if name in metadata},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [
                {"resource": entry.get("resource"), "name": entry.get("name")}
                for entry in status.get("reservedFor") or ()
            ],
        },
    }
