"""Handles HTTP requests: faults, tokens and responses. A watch sends old changes, then new ones, and bookmarks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from playground.apiserver.failure import ApiFailure, bad_request
from playground.apiserver.faults import Faults
from playground.apiserver.resources import Route, document, parse_path
from playground.apiserver.rest import Call
from playground.apiserver.store import Predicate, Store, selector

if TYPE_CHECKING:
    from playground.apiserver.server import PlaygroundApiServer

_DEFAULT_S = 1800.0
_HEALTH = ("/readyz", "/livez", "/healthz")


class _Drip:
    """Writes one byte at a time, with a pause before each."""

    def __init__(self, whole: Any, pause: Callable[[], None]) -> None:
        self._whole = whole
        self._pause = pause

    def write(self, data: bytes) -> int:
        for byte in data:
            self._pause()
            self._whole.write(bytes([byte]))
            self._whole.flush()
        return len(data)

    def flush(self) -> None:
        self._whole.flush()


class Handler(BaseHTTPRequestHandler):
    """Handles a connection. The server sets `api` in a subclass."""

    api: PlaygroundApiServer
    protocol_version = "HTTP/1.1"
    server_version = "gpu-dra-driver-playground"
    wbufsize = 65536  # headers and body in one packet; otherwise delayed ACKs cost 40 ms per request
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Start a connection."""
        super().setup()
        self._silenced = self.api.faults.silenced

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: `server.requests` is the log."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole, pause_s = self.wfile, self.api.faults.drip_of(path)
        if pause_s:
            self.wfile = _Drip(whole, lambda: self.api.pause(pause_s))  # type: ignore[assignment]
        try:
            if self._silenced != self.api.faults.silenced:
                self.api.pause(threading.TIMEOUT_MAX)  # until the server stops
            if self.api.faults.down:
                raise WatchCutError
            self.api.pause(self.api.faults.delay_of(path))
            self._answer_or_refuse(path, query, body)
        except ApiFailure as failure:
            self._record(path, query, failure.code)
            self._send(failure.code, failure.status(), failure.headers)
        except (WatchCutError, ConnectionError):
            self._record(path, query, 0)
            self.close_connection = True
        finally:
            self.wfile = whole

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815  http.server's names

    def _answer_or_refuse(self, path: str, query: Mapping[str, str], body: bytes) -> None:
        """Respond with 400 to Python errors: they mean fields of a wrong type, which a typed server refuses."""
        try:
            self._answer(path, query, body)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise bad_request(f"the object provided is unrecognized: {error!r}") from error

    def _answer(self, path: str, query: Mapping[str, str], body: bytes) -> None:
        fault = self.api.faults.answer_of(self.command, unquote(self.path))
        if fault is not None:
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            if fault.body is None:
                text = "the playground's API server was configured to fail this request"
                raise ApiFailure(fault.status, fault.reason, text, details={"name": "fault"}, headers=headers)
            self._record(path, query, fault.status)
            self._send_bytes(fault.status, fault.body, "text/plain", headers)
            return
        if path in _HEALTH:
            self._send_bytes(200, b"ok", "text/plain", {})
            return
        self._authenticate()
        found = document(path, self.api.served, self.api.operations.minor)
        if found is not None and self.command == "GET":
            self._record(path, query, 200)
            self._send(200, found, {})
            return
        self._answer_resource(path, query, body)

    def _answer_resource(self, path: str, query: Mapping[str, str], body: bytes) -> None:
        route = parse_path(urlsplit(self.path).path, self.api.served)
        if self.command == "GET" and query.get("watch") in ("true", "1"):
            self._record(path, query, 200)
            self._watch(route, query)
            return
        content_type = (self.headers.get("Content-Type") or "").partition(";")[0].strip()
        with self.api.store.changed:  # tests count requests as soon as they see their effects
            code, answer = self.api.rest.handle(
                Call(self.command, route, query, body, content_type, self.headers.get("Accept") or "")
            )
            self._record(path, query, code)
        self._send(code, answer, {})

    def _watch(self, route: Route, query: Mapping[str, str]) -> None:
        if route.name is not None:
            query = {**query, "fieldSelector": f"metadata.name={route.name}"}
        watch = Watch.from_query(route, query)
        events = WatchServer(self.api.store, self.api.faults, self.api.bookmark_s, self.api.is_running)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        events.serve(watch, self._write_chunk)
        self.wfile.write(b"0\r\n\r\n")

    def _write_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _authenticate(self) -> None:
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        tokens = self.api.tokens
        if tokens is not None and (scheme.lower() != "bearer" or token.strip() not in tokens):
            raise ApiFailure(401, "Unauthorized", "Unauthorized")

    def _record(self, path: str, query: Mapping[str, str], status: int) -> None:
        self.api.record(self.command, path, query, self.headers.get("User-Agent") or "", status)

    def _send(self, code: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self._send_bytes(code, json.dumps(body, separators=(",", ":")).encode(), "application/json", headers)

    def _send_bytes(self, code: int, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class WatchCutError(Exception):
    """The connection must be dropped without a normal end."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The parameters of a watch request. `start` is the version after which it starts; None means to list first.

    With `is_list` (`sendInitialEvents`), a bookmark marks the end of the list; kubectl 1.36 waits for it.
    """

    route: Route
    selected: Predicate
    start: int | None
    bookmarks: bool
    timeout_s: float
    is_list: bool = False

    @classmethod
    def from_query(cls, route: Route, query: Mapping[str, str]) -> Watch:
        """Return the parameters from a query. Raises: ApiFailure 400 for invalid parameters."""
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
    """Sends the events of one watch."""

    def __init__(self, store: Store, faults: Faults, bookmark_s: float, running: Callable[[], bool]) -> None:
        self._store = store
        self._faults = faults
        self._cuts = faults.cuts  # read before the response starts, so that no cut is missed
        self._bookmark_s = bookmark_s
        self._running = running

    def serve(self, watch: Watch, write: Callable[[bytes], None]) -> None:
        """Send events with `write`, one chunk each, until the watch's timeout. Raises: WatchCutError; OSError if the
        client disconnected.
        """
        if self._faults.watch_events is not None:
            for event in self._faults.watch_events:
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
            write(_line("ADDED", watch.route.shown(item)))
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
                write(_line(event[0], watch.route.shown(event[1])))
        return at

    def _bookmark(self, watch: Watch, at: int) -> dict[str, Any]:
        return watch.route.shown({"metadata": {"resourceVersion": str(at), "creationTimestamp": None}})


def _line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"
