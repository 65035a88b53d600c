"""ResourceSlices of one driver on one node: list, write and watch; nothing else can be seen or touched."""

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
    """The slices with `spec.driver` and `spec.nodeName` as given, listed again once an event of the watch or a write of
    ours made the last list old.

    `on_change()` runs on the watch thread, and must be quick: after each list that the watch begins with, and after
    each event. An event may be the echo of our own write; the publisher then finds nothing to do. `current` and the
    writes also work without `start`.
    """

    def __init__(
        self,
        api: ApiClient,
        driver: str,
        node: str,
        on_change: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        """`more` is for the Follower."""
        selector, what = (
            f"spec.driver={driver},spec.nodeName={node}",
            f"resource slices of {driver} on node {node}",
        )
        super().__init__("slice-cache", api, group_path(_PLURAL), selector, what, **more)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._slices: list[dict[str, Any]] = []
        self._changes = 0  # events and writes that we know of
        self._listed_at = -1  # how many of them were there when the last list was asked for
        self.synced = threading.Event()
        """Whether the first list is in."""

    @property
    def count(self) -> int:
        """How many slices the last list had."""
        return len(self._slices)

    def current(self) -> list[dict[str, Any]]:
        """All slices, sorted by name, own writes included; not to be changed. The server is asked only if the last list
        is old. Raises: ApiUnavailableError, ApiRejectedError."""
        with self._lock:
            is_old = self._listed_at < self._changes
        if is_old:
            self._list()
        return self._slices

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """As every Follower; sorted by name."""
        items, version = super().list()
        return sorted(
            (_TYPE | item for item in items), key=lambda item: str(item["metadata"]["name"])
        ), version

    def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        """The stored slice, which may lack fields of `obj`."""
        metadata = obj["metadata"]
        action = f"create resource slice {metadata.get('name') or metadata.get('generateName')}"
        return self._write("POST", obj | _TYPE, action=action)

    def update(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Replace the slice of that name, and return the stored one; a stale resourceVersion is refused with 409."""
        name = obj["metadata"]["name"]
        return self._write("PUT", obj | _TYPE, name=name, action=f"update resource slice {name}")

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        """Delete exactly that object; that it is gone already is success. A changed one is a 409."""
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
            self._outdate()  # also after a write that failed: it may have arrived

    def _outdate(self) -> None:
        with self._lock:
            self._changes += 1

    def _list(self) -> str:
        """The version of the list. What changes while it is on its way makes it old at once."""
        with self._lock:
            changes = self._changes
        slices, version = self.list()
        with self._lock:
            if changes >= self._listed_at:  # another thread may have asked later, and be done
                self._slices, self._listed_at = slices, changes
        return version

    def _relist(self) -> str:
        version = self._list()
        self.synced.set()
        self._on_change()
        return version

    def _happened(self, _event: dict[str, Any]) -> None:
        self._outdate()
        self._on_change()
