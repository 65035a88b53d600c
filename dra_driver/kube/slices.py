"""ResourceSlices of one driver on one node: list, write and watch; nothing else can be seen or touched."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import WatchExpiredError
from dra_driver.kube.client import GROUP_VERSION, ApiClient, WatchStream, group_path, is_not_found

log = structlog.get_logger(__name__)

_PLURAL = "resourceslices"
_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security
_WATCH_S = (300, 600)  # the server ends a watch after that long; spread, so that not all nodes return at once
_IDLE_S = 90.0
"""Bookmarks come about once a minute. When one is missing, the server is dead, and a balancer acknowledges in its
place. Until then nothing tells of slices that somebody deletes; claims and health do not need the watch."""
_TYPE = {"apiVersion": GROUP_VERSION, "kind": "ResourceSlice"}
_JOIN_S = 5.0
_BACKOFF_S = (1.6, 30.0)
"""The first wait, half of which is left to chance, is that of client-go's informers: 10,000 nodes whose watches end in
the same moment come back over 0.8 s."""


class SliceCache:
    """The slices with `spec.driver` and `spec.nodeName` as given, listed again once an event of the watch or a write of
    ours made the last list old.

    `on_change()` runs on the watch thread, and must be quick: after each list that the watch begins with, and after
    each event. An event may be the echo of our own write; the publisher then finds nothing to do. Idle it sleeps in one
    socket read. `list` and the writes also work without `start`.
    """

    def __init__(
        self,
        api: ApiClient,
        driver: str,
        node: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        idle_timeout_s: float = _IDLE_S,
        backoff_s: tuple[float, float] = _BACKOFF_S,
    ) -> None:
        self._api = api
        self._on_change = on_change
        self._idle_timeout_s = idle_timeout_s
        self._selector = {"fieldSelector": f"spec.driver={driver},spec.nodeName={node}"}
        self._whose = f"{driver} on node {node}"
        self._backoff = Backoff(*backoff_s, spread=(0.5, 1.0))
        self._lock = threading.Lock()
        self._slices: list[dict[str, Any]] = []
        self._changes = 0  # events and writes that we know of
        self._listed_at = -1  # how many of them were there when the last list was asked for
        self._stop = threading.Event()
        self._stream: WatchStream | None = None
        self._thread: threading.Thread | None = None
        self.synced = threading.Event()
        self.failing: tuple[float, str] | None = None
        """Since when (time.monotonic()) list and watch have failed without a success in between, and why."""

    def start(self) -> None:
        """Start the thread; `synced` is set once the first list is in."""
        self._thread = threading.Thread(target=self._run, name="slice-cache", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch and wait for the thread; harmless twice."""
        self._stop.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

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
        """Asks the server: (slices sorted by name, resource version to watch from)."""
        action = f"list resource slices of {self._whose}"
        answer = self._api.call("GET", _PLURAL, query=self._selector, action=action)
        items = [_TYPE | item for item in answer.get("items") or ()]
        items.sort(key=lambda item: str(item["metadata"]["name"]))
        return items, str((answer.get("metadata") or {}).get("resourceVersion") or "")

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
        return self._api.watch(
            group_path(_PLURAL), query=query, action=action, idle_timeout_s=self._idle_timeout_s
        )

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

    def _run(self) -> None:
        version = ""
        while not self._stop.is_set():
            failure: Exception | None = None
            try:
                version = version or self._relist()
                resume_at, failure = self._follow(version)
            except Exception as error:  # noqa: BLE001  a dead thread would leave the node without repair
                # A server that was away may come back with another history, as after a restored backup:
                # a watch from our version would then stay silent for as long as it takes to catch up.
                resume_at, failure = "", error
            if not self._stop.is_set():
                self._pause(version, failure)
            version = resume_at

    def _pause(self, version: str, failure: Exception | None) -> None:
        """Wait before the next list or watch, whatever ended the last one: what ended it may end the next one at once,
        and the watches of all other nodes too."""
        asked_s = failure.retry_after_s if isinstance(failure, ApiUnavailableError) else None
        wait_s = self._backoff.next(asked_s)
        retry_s = round(wait_s, 2)
        match failure:
            case None:
                pass
            case WatchExpiredError():
                log.info("slice_watch_expired", resource_version=version, retry_s=retry_s)
            case ApiUnavailableError() | ApiRejectedError():
                log.warning("slice_watch_failed", error=str(failure), retry_s=retry_s)
            case _:
                log.error("slice_watch_failed", error=str(failure), retry_s=retry_s, exc_info=failure)
        if failure is not None:
            self.failing = (time.monotonic() if self.failing is None else self.failing[0], str(failure))
        self._stop.wait(wait_s)

    def _relist(self) -> str:
        version = self._list()
        self.synced.set()
        self._on_change()
        return version

    def _follow(self, version: str) -> tuple[str, ApiUnavailableError | None]:
        """Tell of events until the watch ends; (version to resume from, what broke it, None if it ended in order).

        Raises: WatchExpiredError also for an event from before `version`: the history was set back.
        """
        started = time.monotonic()
        stream = self.open_watch(version)
        self.failing = None
        with self._lock:
            self._stream = stream
        if self._stop.is_set():
            stream.close()
        try:
            for event in stream:
                version = version_after(version, event)
                if event.get("type") != "BOOKMARK":
                    self._outdate()
                    self._on_change()
        except ApiUnavailableError as error:
            return version, error
        finally:
            self._backoff.reset(time.monotonic() - started)
            with self._lock:
                self._stream = None
        return version, None


def version_after(version: str, event: dict[str, Any]) -> str:
    """The version after this event. Raises: WatchExpiredError if that is an earlier one."""
    metadata = event["object"].get("metadata") if isinstance(event.get("object"), dict) else None
    new = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(new, str) or not new:
        return version
    if new.isdecimal() and version.isdecimal() and int(new) < int(version):
        text = f"watch resource slices: version {new} came after {version}; the server's history was set back"
        raise WatchExpiredError(text, status=410, reason="Expired")
    return new
