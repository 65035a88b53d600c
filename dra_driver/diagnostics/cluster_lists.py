"""What a cluster has that concerns one driver: lists, page by page, of each object only what a look at it needs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dra_driver.diagnostics.packed_slices import packed, uncollected
from dra_driver.diagnostics.rules.cluster_view import results_of, workload_of
from dra_driver.diagnostics.rules.readable import as_object, unreadable
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, FatalError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.convert import from_version
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.versions import ResourceApi
from dra_driver.kube.watch_stream import WatchStream

JsonObject = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""

_PAGE = 500
_PAGE_OF_SLICES = 100
"""A slice can have half a MiB in memory before it is packed."""
_METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1,application/json"
_UNSCHEDULED = "spec.nodeName=,status.phase=Pending"
_FORGOTTEN = 410
"""A list took so long that the server forgot how it looked at its beginning."""
_WATCH_S = (300, 600)
"""The server ends a watch after that long."""
_IDLE_S = 150.0
"""Bookmarks come about once a minute: after two that are missing the server is taken for dead."""
_PODS = "/api/v1/pods"

_Page = Callable[[dict[str, str]], JsonObject]
"""The answer to one request of a list, with that query."""
_Watch = Callable[[dict[str, str]], WatchStream]


@dataclass(frozen=True, slots=True)
class ClusterLists:
    """Slices, packed, claims and classes in v1 shape; `workloads` has that of each pod, `waiting` the pods without a
    node. `lacking` are the rights that are missing, and without which something cannot be told; `unreadable` says which
    objects were left out, and why."""

    slices: list[JsonObject]
    claims: list[JsonObject]
    classes: list[JsonObject]
    workloads: dict[Key, str] = field(default_factory=dict)
    waiting: list[JsonObject] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


class Listed:
    """The objects of one resource, of each what `keep` leaves of it; filled by `read`, kept up to date by `take`. What
    cannot be read is left out."""

    def __init__(
        self,
        name: str,
        resource: str,
        kind: str,
        keep: Callable[[JsonObject], Any],
        page: _Page,
        watch: _Watch,
        limit: int = _PAGE,
    ) -> None:
        self.name = name
        self._resource = resource
        self._kind = kind
        self._keep = keep
        self._page = page
        self._watch = watch
        self._limit = limit
        self._lock = threading.Lock()
        self._items: dict[Key, Any] = {}
        self._unreadable: dict[Key, str] = {}

    def unreadable(self) -> list[str]:
        """Which objects were left out, and why."""
        with self._lock:
            return [*self._unreadable.values()]

    def items(self) -> dict[Key, Any]:
        """What there is now."""
        with self._lock:
            return dict(self._items)

    def read(self) -> str:
        """List all; the version to watch from. In one piece if the server forgets the beginning of the list before its
        end is read. Raises: FatalError that names the right that is missing; ApiUnavailableError, ApiRejectedError.
        """
        try:
            return self._read(self._limit)
        except ApiRejectedError as error:
            if error.status == 401:
                raise FatalError(
                    "the API server does not accept these credentials; they may have expired: log in anew"
                ) from error
            if error.status == 403:
                raise FatalError(
                    f"this user may not list {self._resource} in all namespaces; "
                    f"ask for a ClusterRole with the verb list for {self._resource}"
                ) from error
            if error.status != _FORGOTTEN:
                raise
        return self._read(None)

    def _read(self, limit: int | None) -> str:
        items: dict[Key, Any] = {}
        left_out: dict[Key, str] = {}
        query = {} if limit is None else {"limit": str(limit)}
        more: dict[str, str] = {}
        while True:
            with uncollected():
                answer = self._page(query | more)
                for entry in self._entries(answer):
                    self._put(entry, items, left_out)
                metadata = as_object(answer.get("metadata"))
                del answer
            if not metadata.get("continue"):
                break
            more = {"continue": str(metadata["continue"])}
        with self._lock:
            self._items, self._unreadable = items, left_out
        return str(metadata.get("resourceVersion") or "")

    def _entries(self, answer: JsonObject) -> list[Any]:
        entries = answer.get("items")
        if isinstance(entries, list) or (entries is None and "items" in answer):
            return entries or []
        raise ApiUnavailableError(f"list {self.name}: the answer has no list of {self.name} in it")

    def _put(self, entry: Any, items: dict[Key, Any], left_out: dict[Key, str]) -> None:
        why = unreadable(self._kind, entry)
        if why is None:
            items[_key(entry)] = self._keep(entry)
        else:
            left_out[_key(entry)] = why

    def watch(self, version: str) -> WatchStream:
        """The changes after that version. Raises: WatchExpiredError (read again), also while it is read;
        ApiUnavailableError, ApiRejectedError."""
        seconds = int(random.uniform(*_WATCH_S))  # noqa: S311  spreads load
        return self._watch(
            {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(seconds),
            }
        )

    def take(self, event: JsonObject) -> str:
        """Take in an event of the watch; the version after it, empty if it tells none."""
        entry = from_version(as_object(event.get("object")))
        kind = event.get("type")
        with self._lock:
            if kind in ("DELETED", "ADDED", "MODIFIED"):
                self._items.pop(_key(entry), None)
                self._unreadable.pop(_key(entry), None)
            if kind in ("ADDED", "MODIFIED"):
                self._put(entry, self._items, self._unreadable)
        return str(as_object(entry.get("metadata")).get("resourceVersion") or "")


class ClusterReader:
    """All lists that concern one driver; with `with_owners` those of all pods too, for their workloads."""

    def __init__(self, endpoint: Endpoint, driver: str, *, timeout_s: float, with_owners: bool) -> None:
        client = ApiClient(endpoint, timeout_s=timeout_s)
        self._api = ResourceApi(client)
        of_driver = {"fieldSelector": f"spec.driver={driver}"}
        self._slices = self._of_group("resourceslices", "ResourceSlice", packed, of_driver, _PAGE_OF_SLICES)
        self._claims = self._of_group(
            "resourceclaims", "ResourceClaim", lambda claim: _kept_claim(claim, driver), {}
        )
        self._classes = self._of_group("deviceclasses", "DeviceClass", _slim, {})
        self.waiting = _of_pods("waiting", client, client, _slim, {"fieldSelector": _UNSCHEDULED})
        self.needed = [self._slices, self._claims, self._classes]
        self._owners: Listed | None = None
        if with_owners:
            # Pods are large; of those that run, the metadata says who owns them.
            accepts = (_METADATA.format(suffix) for suffix in ("List", ""))
            lists, events = (
                ApiClient(endpoint, timeout_s=timeout_s, headers={"Accept": accept}) for accept in accepts
            )
            self._owners = _of_pods("owners", lists, events, lambda pod: workload_of(pod["metadata"]), {})
            self.needed.append(self._owners)

    def read(self) -> ClusterLists:
        """Raises: FatalError that names the right that is missing; ApiUnavailableError, ApiRejectedError."""
        for listed in self.needed:
            listed.read()
        lacking = []
        try:
            self.waiting.read()
        except FatalError as error:
            lacking.append(str(error))
        return self.lists(lacking)

    def lists(self, lacking: list[str]) -> ClusterLists:
        """What was read and heard of until now."""
        slices, claims, classes, waiting = (
            [*listed.items().values()] for listed in (self._slices, self._claims, self._classes, self.waiting)
        )
        workloads = self._owners.items() if self._owners else {}
        # A pod that waits is on two lists.
        left_out = [text for listed in (*self.needed, self.waiting) for text in listed.unreadable()]
        return ClusterLists(slices, claims, classes, workloads, waiting, lacking, [*dict.fromkeys(left_out)])

    def _of_group(
        self,
        plural: str,
        kind: str,
        keep: Callable[[JsonObject], Any],
        query: dict[str, str],
        limit: int = _PAGE,
    ) -> Listed:
        return Listed(
            plural,
            f"{plural}.resource.k8s.io",
            kind,
            keep,
            lambda more: self._api.call("GET", plural, action=f"list {plural}", query=query | more),
            lambda more: self._api.watch(
                plural, action=f"watch {plural}", query=query | more, idle_timeout_s=_IDLE_S
            ),
            limit,
        )


def _of_pods(
    name: str,
    lists: ApiClient,
    events: ApiClient,
    keep: Callable[[JsonObject], Any],
    query: dict[str, str],
) -> Listed:
    return Listed(
        name,
        "pods",
        "Pod",
        keep,
        lambda more: lists.request("GET", _PODS, action="list pods", query=query | more),
        lambda more: events.watch(_PODS, action="watch pods", query=query | more, idle_timeout_s=_IDLE_S),
    )


def _key(entry: Any) -> Key:
    metadata = as_object(as_object(entry).get("metadata"))
    return str(metadata.get("namespace") or ""), str(metadata.get("name"))


def _slim(entry: JsonObject) -> JsonObject:
    """Without the record of who wrote which field, which can be longer than the rest."""
    (entry.get("metadata") or {}).pop("managedFields", None)
    return entry


def _kept_claim(claim: JsonObject, driver: str) -> JsonObject:
    """Of a claim that has its devices, who has which; all of one that waits."""
    status = claim.get("status") or {}
    if not status.get("allocation"):
        return _slim(claim)
    metadata = claim["metadata"]
    results = [
        {name: value for name, value in result.items() if name not in ("driver", "tolerations", "request")}
        | {"driver": driver}
        for result in results_of(claim)
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
