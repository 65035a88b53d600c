"""ResourceSlices of one driver on one node: list, write and watch, nothing else can be seen or touched."""

from __future__ import annotations

import random
from typing import Any

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import WatchStream, is_not_found
from dra_driver.kube.resource_api import GROUP_VERSION, ResourceApi

_PLURAL = "resourceslices"
_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security
_WATCH_S = (300, 600)  # the server ends a watch after that long; spread, so that not all nodes return at once
_IDLE_S = 90.0
"""Bookmarks come about once a minute. When one is missing, the server is dead, and a balancer acknowledges in its
place. Until then nothing tells of slices that somebody deletes; claims and health do not need the watch."""


class SliceClient:
    """The slices with `spec.driver` and `spec.nodeName` as given."""

    def __init__(self, api: ResourceApi, driver: str, node: str, *, idle_timeout_s: float = _IDLE_S) -> None:
        self._api = api
        self._idle_timeout_s = idle_timeout_s
        self._selector = {"fieldSelector": f"spec.driver={driver},spec.nodeName={node}"}
        self._whose = f"{driver} on node {node}"

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """(slices sorted by name, resource version to watch from)."""
        action = f"list resource slices of {self._whose}"
        answer = self._api.call("GET", _PLURAL, query=self._selector, action=action)
        items = [
            {"apiVersion": GROUP_VERSION, "kind": "ResourceSlice"} | item
            for item in answer.get("items") or ()
        ]
        items.sort(key=lambda item: str(item["metadata"]["name"]))
        return items, str((answer.get("metadata") or {}).get("resourceVersion") or "")

    def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        """The stored slice, which may lack fields of `obj`."""
        metadata = obj["metadata"]
        action = f"create resource slice {metadata.get('name') or metadata.get('generateName')}"
        return self._api.call("POST", _PLURAL, body=_typed(obj), action=action)

    def update(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Replace the slice of that name, and return the stored one; a stale resourceVersion is refused with 409."""
        name = obj["metadata"]["name"]
        action = f"update resource slice {name}"
        return self._api.call("PUT", _PLURAL, name=name, body=_typed(obj), action=action)

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        """Delete exactly that object; that it is gone already is success. A changed one is a 409."""
        preconditions = {"uid": uid}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        try:
            self._api.call("DELETE", _PLURAL, name=name, body=body, action=f"delete resource slice {name}")
        except ApiRejectedError as error:
            if not is_not_found(error):
                raise

    def open_watch(self, resource_version: str) -> WatchStream:
        """A raw stream of events after `resource_version`; the caller closes it.

        Raises: WatchExpiredError (list again), ApiUnavailableError, ApiRejectedError; while it is read also
        ApiUnavailableError for a connection that broke or 90 s of silence, after which the server is dead.
        """
        # Not a matter of security: spreads load.
        seconds = _jitter.uniform(*_WATCH_S)
        query = self._selector | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(int(seconds)),
        }
        action = f"watch resource slices of {self._whose}"
        return self._api.watch(_PLURAL, query=query, action=action, idle_timeout_s=self._idle_timeout_s)


def _typed(obj: dict[str, Any]) -> dict[str, Any]:
    return obj | {"apiVersion": GROUP_VERSION, "kind": "ResourceSlice"}
