"""Sends requests to the API server with plain dicts, mapped errors, retries, and limits for time and size."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

import dra_driver
from dra_driver.base.backoff import TokenBucket
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.kube.api_errors import ApiErrors, PathNotFoundError
from dra_driver.kube.decoding import MAX_BYTES, TooLargeError
from dra_driver.kube.endpoint import Access, Endpoint
from dra_driver.kube.transport import Route, body_of, new_manager, opened, piece_of, wait_for_each_piece
from dra_driver.model.dataclass import KW_ONLY, dataclass

FIELD_MANAGER = "gpu-dra-driver"
"""The beginning of the user agent: the default owner of writes in `metadata.managedFields`."""
USER_AGENT = f"{FIELD_MANAGER}/{dra_driver.__version__}"
GROUP = "resource.k8s.io"
GROUP_VERSION = f"{GROUP}/v1"
"""Served since Kubernetes 1.34."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
DEFAULT_TIMEOUT_S = 10.0
ATTEMPT_S = 8.0
"""How long the first attempt may take: an API server that vanishes without a RST leaves dead connections."""


@dataclass(frozen=True, slots=True)
class _Request:
    """The response must be complete by `until` (time.monotonic()); a watch has a maximum time without data instead."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: Any = None
    content_type: str = JSON
    until: float = math.inf
    idle_s: float = math.inf

    @property
    def is_repeatable(self) -> bool:
        """Whether a repetition does no harm: a PUT names the version that it replaces, a DELETE the UID, and a PATCH
        contains absolute values.
        """
        return self.method != "POST"


@dataclass(eq=False)
class ApiClient:
    """A client for one API server. Thread-safe.

    Every call raises ApiUnavailableError (retry later) or ApiRejectedError. `observe` gets each request's method and
    status, None without a response.
    """

    endpoint: Endpoint
    _: KW_ONLY
    timeout_s: float = DEFAULT_TIMEOUT_S
    limiter: TokenBucket | None = None
    observe: Callable[[str, int | None], None] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._manager: urllib3.PoolManager | None = None
        self._leads_along: Route | None = None

    def open(self) -> None:
        """Read the configuration. Raises: InvalidConfigError."""
        self._manager_for(self.endpoint.access().route)

    def request(
        self,
        method: str,
        path: str,
        *,
        action: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the decoded response. Error messages begin with "cannot" and `action`, such as "get
        claim ns/name".

        The call takes at most `timeout_s`, including the wait for the rate limit.
        """
        wanted = _Request(method, path, query, body, content_type, self._until(timeout_s))
        _, data, errors = self._answer(wanted, action)
        decoded = errors.decoded(data or b"{}")
        return decoded if isinstance(decoded, dict) else {"items": decoded}

    def call(
        self,
        method: str,
        plural: str,
        *,
        namespace: str | None = None,
        name: str | None = None,
        subresource: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """`more` is passed to `request`."""
        return self.request(method, group_path(plural, namespace, name, subresource), **more)

    def check_group(self) -> None:
        """Raise PathNotFoundError if the server does not serve resource.k8s.io."""
        self.request("GET", f"/apis/{GROUP_VERSION}", action=f"get {GROUP_VERSION}")

    def text(self, path: str, *, action: str, timeout_s: float | None = None) -> str:
        """Return for example a pod's page through the server's proxy."""
        return self._answer(_Request("GET", path, until=self._until(timeout_s)), action)[1].decode(
            errors="replace"
        )

    def watch(
        self, path: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch, which breaks if nothing arrives for `idle_timeout_s`, not even a bookmark."""
        response, _, errors = self._answer(_Request("GET", path, query, idle_s=idle_timeout_s), action)
        return WatchStream(response, errors)

    def close(self) -> None:
        """Close idle connections. Calls in progress continue."""
        with self._lock:
            if self._manager is not None:
                self._manager.clear()
                self._manager = None

    def _answer(
        self, wanted: _Request, action: str
    ) -> tuple[urllib3.BaseHTTPResponse, bytes | bytearray, ApiErrors]:
        errors = ApiErrors(action, self.endpoint.hide)
        with errors.mapped():
            used = self.endpoint.access(self._left(wanted))
        errors = ApiErrors(action, self.endpoint.hide, used.route.proxy)
        with errors.mapped():
            response, data = self._send_repeated(wanted, used)
            if response.status == 401:
                used = self.endpoint.renew(used, self._left(wanted))
                response, data = self._send_repeated(wanted, used)
        try:
            errors.check_status(response, data)
        except PathNotFoundError as error:
            if not wanted.path.startswith(f"/apis/{GROUP_VERSION}"):
                raise
            raise PathNotFoundError(
                f"{error}; the API server does not serve {GROUP_VERSION}, or a proxy does not forward it:"
                " use Kubernetes 1.34 or later",
                status=error.status,
                reason=error.reason,
            ) from error
        return response, data, errors

    def _left(self, wanted: _Request) -> float:
        return min(wanted.until - time.monotonic(), max(self.timeout_s, ATTEMPT_S))

    def _send_repeated(
        self, wanted: _Request, access: Access
    ) -> tuple[urllib3.BaseHTTPResponse, bytes | bytearray]:
        """Repeat once if necessary, on a new connection with all remaining time."""
        try:
            return self._send_once(wanted, access, ATTEMPT_S if wanted.is_repeatable else math.inf)
        except (ProtocolError, ReadTimeoutError):
            if not wanted.is_repeatable or time.monotonic() >= wanted.until:
                raise  # a POST may have arrived, so the caller must check first
        return self._send_once(wanted, access, math.inf)

    def _send_once(
        self, wanted: _Request, access: Access, max_s: float
    ) -> tuple[urllib3.BaseHTTPResponse, bytes | bytearray]:
        if self.limiter is not None:
            self.limiter.acquire(wanted.until - time.monotonic())
        manager = self._manager_for(access.route)
        status: int | None = None
        try:
            response = self._opened(manager, wanted, access, max_s)
            status = response.status
            if wanted.until < math.inf or status >= 300:
                return response, body_of(response)
            wait_for_each_piece(response, wanted.idle_s)
            return response, b""
        except (ProtocolError, ReadTimeoutError):
            self._drop(manager)
            raise
        finally:
            if self.observe is not None:
                self.observe(wanted.method, status)

    def _opened(
        self, manager: urllib3.PoolManager, wanted: _Request, access: Access, max_s: float
    ) -> urllib3.BaseHTTPResponse:
        left_s = min(wanted.until - time.monotonic(), max_s, wanted.idle_s)
        if left_s <= 0:
            raise TimeoutError("the time limit was reached before the request was sent to the API server")
        headers = {
            "Accept": JSON,
            "User-Agent": USER_AGENT,
        }
        if access.authorization:
            headers["Authorization"] = access.authorization
        body = None
        if wanted.body is not None:
            headers["Content-Type"] = wanted.content_type
            body = json.dumps(wanted.body).encode()
        url = access.route.server + wanted.path
        if wanted.query:
            url += "?" + urlencode(wanted.query)
        return opened(manager, wanted.method, url, headers, body, left_s)

    def _drop(self, manager: urllib3.PoolManager) -> None:
        """Start a new connection pool: other connections of this one may lead to the same dead peer.

        Other threads may be about to use the old pool, so it is not closed.
        """
        with self._lock:
            if self._manager is manager:
                self._manager = None

    def _manager_for(self, route: Route) -> urllib3.PoolManager:
        """Return a new pool if the route has changed. Raises: InvalidConfigError."""
        with self._lock:
            if self._manager is None or self._leads_along != route:
                try:
                    self._manager = new_manager(route)
                except (OSError, ValueError) as error:
                    raise InvalidConfigError(
                        f"{self.endpoint.origin}: the CA, the client certificate or its key cannot be loaded: {error};"
                        " they must be PEM files"
                    ) from error
                self._leads_along = route
            return self._manager

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)


class WatchStream:
    """Iterates over events ({"type", "object"}). `close()` from any thread ends the iteration at once.

    Raises: ApiUnavailableError if the connection breaks or is silent for too long; for an ERROR event the error for its
    code.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, errors: ApiErrors) -> None:
        self._response = response
        self._errors = errors
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        # Not response.close(), which would wait for a lock that the reader holds.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self._errors.mapped():
                for line in self._lines():
                    yield self._event(line)
        except ApiUnavailableError:
            if not self._closed.is_set():
                raise
        finally:
            self._closed.set()
            self._response.close()

    def _lines(self) -> Iterator[bytearray]:
        rest = bytearray()
        while piece := piece_of(self._response):
            if self._closed.is_set():
                return
            searched = len(rest)
            rest += piece
            while (end := rest.find(b"\n", searched)) >= 0:
                line, searched = rest[:end], 0
                del rest[: end + 1]
                if line:
                    yield line
            if len(rest) > MAX_BYTES:
                raise TooLargeError(f"an event is larger than {MAX_BYTES >> 20} MiB")
        if rest and not self._closed.is_set():
            raise HTTPError("connection to the API server broke in the middle of an event")

    def _event(self, line: bytes | bytearray) -> dict[str, Any]:
        event = self._errors.decoded(line)
        if not isinstance(event, dict):
            raise ApiUnavailableError(f"{self._errors.action}: an event of the watch is not an object")
        if event.get("type") != "ERROR":
            return event
        status = event.get("object")
        status = status if isinstance(status, dict) else {}
        code = status.get("code")
        code = code if isinstance(code, int) else 500
        raise self._errors.failure(str(status.get("message") or "watch failed"), code, status)


def path_segment(name: str) -> str:
    """Return a segment of a URL path that cannot lead to another object. Raises: ApiRejectedError (400)."""
    if name in ("", ".", ".."):
        raise ApiRejectedError(
            f"{name!r} cannot be the name of an API object", status=400, reason="BadRequest"
        )
    return quote(name, safe="")


def is_not_found(error: BaseException) -> bool:
    return isinstance(error, ApiRejectedError) and error.status == 404


def group_path(plural: str, namespace: str | None = None, *rest: str | None) -> str:
    """Return a path in resource.k8s.io. Raises: like `path_segment`."""
    inside = ["namespaces", path_segment(namespace)] if namespace is not None else []
    named = [path_segment(part) for part in rest if part is not None]
    return "/".join(["/apis", GROUP_VERSION, *inside, plural, *named])
