"""This node's slices as the API server has them now, kept by one list-and-watch thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from dra_driver.concurrency.backoff import Backoff
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import WatchExpiredError
from dra_driver.kube.slice_store import SliceStore
from dra_driver.kube.slices import SliceClient, SliceEvent, slice_event
from dra_driver.kube.watch_stream import WatchStream
from dra_driver.model.json_copy import copy_json

log = structlog.get_logger(__name__)

_JOIN_S = 5.0
_BACKOFF_S = (1.6, 30.0)
"""The first wait, half of which is left to chance, is that of client-go's informers: 10,000 nodes whose watches end in
the same moment come back over 0.8 s."""


class SliceCache:
    """An informer for a handful of objects that also carries their writes.

    `on_change()` runs after a change that did not come from this cache's own `create`, `update` and
    `delete`, and after the first list; on the watch thread or on a writing one. It must be quick.
    Idle it sleeps in one socket read.
    """

    def __init__(
        self,
        client: SliceClient,
        on_change: Callable[[], None],
        *,
        backoff_s: tuple[float, float] = _BACKOFF_S,
    ) -> None:
        self._client = client
        self._on_change = on_change
        self._backoff = Backoff(*backoff_s, spread=(0.5, 1.0))
        self._lock = threading.Lock()
        self._store = SliceStore()
        self._writing = 0
        self._held_back: list[tuple[str, str]] = []  # (uid, resourceVersion) seen while we were writing
        self._own: set[tuple[str, str]] = set()  # the same, of what we wrote meanwhile
        self._own_deleted: set[str] = set()
        self._stop = threading.Event()
        self._stream: WatchStream | None = None
        self._thread: threading.Thread | None = None
        self._healthy = False
        self.synced = threading.Event()

    @property
    def healthy(self) -> bool:
        """Whether the last list or watch succeeded and its thread lives."""
        return self._healthy and self._thread is not None and self._thread.is_alive()

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

    def snapshot(self) -> list[dict[str, Any]]:
        """Copies of all slices, own writes included, sorted by name."""
        with self._lock:
            return copy_json(self._store.objects())

    def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Write through: as SliceClient.create, and visible in `snapshot` on return."""
        with self._own_write():
            stored = self._client.create(obj)
            self._wrote(stored)
        return stored

    def update(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Write through: as SliceClient.update."""
        with self._own_write():
            stored = self._client.update(obj)
            self._wrote(stored)
        return stored

    def dry_run(self, obj: dict[str, Any]) -> dict[str, Any]:
        """What `update` would store, without storing it."""
        return self._client.update(obj, dry_run=True)

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        """Write through: as SliceClient.delete."""
        with self._own_write():
            self._client.delete(name, uid, resource_version)
            with self._lock:
                self._store.deleted_by_us(name, uid)
                self._own_deleted.add(uid)

    def _wrote(self, stored: dict[str, Any]) -> None:
        with self._lock:
            self._store.put(stored)
            self._own.add(_version_of(stored))
            if not self._store.has(stored):  # a list made meanwhile was without it, and no event will come
                self._held_back.append((_version_of(stored)[0], ""))

    @contextmanager
    def _own_write(self) -> Iterator[None]:
        """The echo of a write may overtake its answer: judge what arrives meanwhile when it is known."""
        with self._lock:
            self._writing += 1
        try:
            yield
        finally:
            if self._end_of_write():
                self._on_change()

    def _end_of_write(self) -> bool:
        """Whether something foreign arrived during the writes that just ended."""
        with self._lock:
            self._writing -= 1
            if self._writing:
                return False
            foreign = any(
                seen not in self._own and seen[0] not in self._own_deleted for seen in self._held_back
            )
            self._store.all_answered()
            self._held_back.clear()
            self._own.clear()
            self._own_deleted.clear()
            return foreign

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
        self._healthy = False

    def _pause(self, version: str, failure: Exception | None) -> None:
        """Wait before the next list or watch, whatever ended the last one: what ended it may end the next one at once,
        and the watches of all other nodes too."""
        asked_s = failure.retry_after_s if isinstance(failure, ApiUnavailableError) else None
        wait_s = self._backoff.next(asked_s)
        retry_s = round(wait_s, 2)
        self._healthy = failure is None
        match failure:
            case None:
                pass
            case WatchExpiredError():
                log.info("slice_watch_expired", resource_version=version, retry_s=retry_s)
            case ApiUnavailableError() | ApiRejectedError():
                log.warning("slice_watch_failed", error=str(failure), retry_s=retry_s)
            case _:
                log.error("slice_watch_failed", error=str(failure), retry_s=retry_s, exc_info=failure)
        self._stop.wait(wait_s)

    def _relist(self) -> str:
        with self._lock:
            newest, gone = self._store.newest, self._store.gone
        items, version = self._client.list()
        with self._lock:
            changed = self._store.replace(items, version, newest, gone)
        first = not self.synced.is_set()
        self.synced.set()
        self._healthy = True
        if changed or first:
            self._on_change()
        return version

    def _follow(self, version: str) -> tuple[str, ApiUnavailableError | None]:
        """Apply events until the watch ends; (version to resume from, what broke the watch, None if it ended in order).

        Raises: WatchExpiredError also for an event from before `version`: the history was set back.
        """
        started = time.monotonic()
        stream = self._client.open_watch(version)
        with self._lock:
            self._stream = stream
        if self._stop.is_set():
            stream.close()
        self._healthy = True
        try:
            for raw in stream:
                event = slice_event(raw)
                if event is not None:
                    version = _advanced(version, event)
                    self._apply(event)
        except ApiUnavailableError as error:
            return version, error
        finally:
            self._backoff.reset(time.monotonic() - started)
            with self._lock:
                self._stream = None
        return version, None

    def _apply(self, event: SliceEvent) -> None:
        if event.type == "BOOKMARK":
            return
        with self._lock:
            apply = self._store.remove if event.type == "DELETED" else self._store.put
            changed = apply(event.object)
            if self._writing and changed:
                self._held_back.append(_version_of(event.object))
                return
            if not self._writing:
                self._store.all_answered()
        if changed:
            self._on_change()


def _advanced(version: str, event: SliceEvent) -> str:
    """The version after this event. Raises: WatchExpiredError if that is an earlier one."""
    new = event.resource_version
    if new.isdigit() and version.isdigit() and int(new) < int(version):
        text = f"watch resource slices: version {new} came after {version}; the server's history was set back"
        raise WatchExpiredError(text, status=410, reason="Expired")
    return new or version


def _version_of(obj: dict[str, Any]) -> tuple[str, str]:
    metadata = obj["metadata"]
    return str(metadata.get("uid")), str(metadata.get("resourceVersion"))
