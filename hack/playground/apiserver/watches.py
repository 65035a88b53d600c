"""One watch connection: history since a version, then what happens, bookmarks in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from playground.apiserver.convert import api_version, encode
from playground.apiserver.failure import ApiFailure, bad_request
from playground.apiserver.faults import Faults
from playground.apiserver.resources import Route
from playground.apiserver.selectors import Predicate, selector
from playground.apiserver.store import Store

_DEFAULT_S = 1800.0


class WatchCutError(Exception):
    """The connection is to be dropped without a proper end."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a watch request asked for; `start` is the version to begin after, None for "from the list". With `is_list` a
    bookmark tells where the list ends, which kubectl 1.36 waits for (`sendInitialEvents`)."""

    route: Route
    selected: Predicate
    start: int | None
    bookmarks: bool
    timeout_s: float
    is_list: bool = False

    @classmethod
    def from_query(cls, route: Route, query: Mapping[str, str]) -> Watch:
        """Raises: ApiFailure 400 for parameters that make no sense."""
        version = query.get("resourceVersion", "")
        seconds = query.get("timeoutSeconds", "")
        if (version and not version.isdigit()) or (seconds and not seconds.isdigit()):
            raise bad_request(f"invalid resourceVersion or timeoutSeconds: {version!r}, {seconds!r}")
        is_list = query.get("sendInitialEvents") in ("true", "1")
        return cls(
            route,
            selector(route.resource, query, route.namespace),
            int(version) if version not in ("", "0") and not is_list else None,
            query.get("allowWatchBookmarks") in ("true", "1"),
            float(seconds) if seconds not in ("", "0") else _DEFAULT_S,
            is_list,
        )


class WatchServer:
    """Writes the events of one watch through `write`, which sends one chunk."""

    def __init__(self, store: Store, faults: Faults, bookmark_s: float, running: Callable[[], bool]) -> None:
        self._store = store
        self._faults = faults
        self._cuts = faults.cuts  # made before the client knows of its watch: no cut is missed
        self._bookmark_s = bookmark_s
        self._running = running

    def serve(self, watch: Watch, write: Callable[[bytes], None]) -> None:
        """Return at the watch's timeout. Raises: WatchCutError; OSError if the client left."""
        told = self._faults.watch_events
        if told is not None:
            for event in told:
                write(_line(event["type"], event["object"]))
            return
        ends_at = time.monotonic() + watch.timeout_s
        bookmark_at = time.monotonic() + self._bookmark_s
        at = watch.start if watch.start is not None else self._initial(watch, write)
        while time.monotonic() < ends_at:
            if self._broken():
                raise WatchCutError
            try:
                at = self._catch_up(watch, at, write)
            except ApiFailure as failure:
                write(_line("ERROR", failure.status()))
                return
            if watch.bookmarks and time.monotonic() >= bookmark_at:
                write(_line("BOOKMARK", self._bookmark(watch, at)))
                bookmark_at += self._bookmark_s
            wake_at = min(ends_at, bookmark_at) if watch.bookmarks else ends_at
            self._store.wait_after(at, max(0.0, wake_at - time.monotonic()), self._broken)

    def _broken(self) -> bool:
        return self._faults.cuts != self._cuts or not self._running()

    def _initial(self, watch: Watch, write: Callable[[bytes], None]) -> int:
        items, version = self._store.select(watch.route.resource, watch.selected)
        for item in items:
            write(_line("ADDED", encode(watch.route.resource, watch.route.version, item)))
        if watch.is_list:
            bookmark = self._bookmark(watch, version)
            bookmark["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
            write(_line("BOOKMARK", bookmark))
        return version

    def _catch_up(self, watch: Watch, at: int, write: Callable[[bytes], None]) -> int:
        for change in self._store.changes_after(at):
            at = change.version
            event = change.event_for(watch.selected) if change.resource == watch.route.resource else None
            if event is not None:
                write(_line(event[0], encode(watch.route.resource, watch.route.version, event[1])))
        return at

    def _bookmark(self, watch: Watch, at: int) -> dict[str, Any]:
        resource = watch.route.resource
        return {
            "kind": resource.kind,
            "apiVersion": api_version(resource, watch.route.version),
            "metadata": {"resourceVersion": str(at), "creationTimestamp": None},
        }


def _line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"
