"""Lists, writes and watches the ResourceSlices of one driver on one node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import GROUP_VERSION, ApiClient, group_path, is_not_found
from dra_driver.kube.watch import Follower

_PLURAL = "resourceslices"
_TYPE = {"apiVersion": GROUP_VERSION, "kind": "ResourceSlice"}


class SliceCache(Follower):
    """The slices of a driver and node, listed again after each watch event and each write of the plugin.

    `on_change()` runs on the watch thread, even if the plugin's own write caused the event. Raises:
    ApiUnavailableError, ApiRejectedError.
    """

    def __init__(
        self,
        api: ApiClient,
        driver: str,
        node: str,
        on_change: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        selector, what = (
            f"spec.driver={driver},spec.nodeName={node}",
            f"resource slices of {driver} on node {node}",
        )
        super().__init__("slice-cache", api, group_path(_PLURAL), selector, what, **more)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._slices: list[dict[str, Any]] = []
        self._changes = 0  # the number of known events and writes
        self._listed_at = -1  # the value of `_changes` when the last list was requested
        self.synced = threading.Event()

    @property
    def count(self) -> int:
        return len(self._slices)

    def current(self) -> list[dict[str, Any]]:
        """Return slices sorted by name, which callers must not modify. Queries the server only if the last list is
        stale.
        """
        with self._lock:
            is_old = self._listed_at < self._changes
        if is_old:
            self._list()
        return self._slices

    def list(self) -> tuple[list[dict[str, Any]], str]:
        items, version = super().list()
        return sorted(
            (_TYPE | item for item in items), key=lambda item: str(item["metadata"]["name"])
        ), version

    def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Return the stored slice, which may lack fields of `obj`."""
        metadata = obj["metadata"]
        action = f"create resource slice {metadata.get('name') or metadata.get('generateName')}"
        return self._write("POST", obj | _TYPE, action=action)

    def update(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Return the stored slice. A stale resourceVersion is refused with 409."""
        name = obj["metadata"]["name"]
        return self._write("PUT", obj | _TYPE, name=name, action=f"update resource slice {name}")

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        """Delete the slice if it exists. A different UID or version is refused with 409."""
        version = {"resourceVersion": resource_version} if resource_version else {}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid} | version}
        try:
            self._write("DELETE", body, name=name, action=f"delete resource slice {name}")
        except ApiRejectedError as error:
            if not is_not_found(error):
                raise

    def _write(self, method: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        try:
            return self._api.call(method, _PLURAL, body=body, **more)
        finally:
            self._mark_stale()  # even after a failed write, because it may have arrived

    def _mark_stale(self) -> None:
        with self._lock:
            self._changes += 1

    def _list(self) -> str:
        """If slices change during the request, the list is stale."""
        with self._lock:
            changes = self._changes
        slices, version = self.list()
        with self._lock:
            if changes >= self._listed_at:  # another thread's later list may have arrived first
                self._slices, self._listed_at = slices, changes
        return version

    def _relist(self) -> str:
        version = self._list()
        self.synced.set()
        self._on_change()
        return version

    def _on_event(self, _event: dict[str, Any]) -> None:
        self._mark_stale()
        self._on_change()
