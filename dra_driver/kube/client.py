"""HTTP with the API server: pooled, thread-safe, JSON in and out, one error map.

urllib3 is the transport, as in the package `kubernetes`. That package has no deadline for a whole answer, costs 20 MiB
more, and every object here is a plain dict anyway.
"""

from __future__ import annotations

import base64
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ProtocolError, ReadTimeoutError

import dra_driver
from dra_driver.base.backoff import TokenBucket
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import api_errors, check_status, decoded_json
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.timed_connection import answered_by, time_answers
from dra_driver.kube.watch_stream import WatchStream

FIELD_MANAGER = "gpu-dra-driver"
"""Whose writes ours are in `metadata.managedFields`, unless a request says otherwise: how the user agent begins."""
USER_AGENT = f"{FIELD_MANAGER}/{dra_driver.__version__}"
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
DEFAULT_TIMEOUT_S = 10.0
POOL_SIZE = 16
CONNECT_TIMEOUT_S = 5.0
ATTEMPT_S = 8.0
"""How long the first attempt of a request may take, and how long a peer may leave what was sent unacknowledged: an API
server that vanishes without a RST leaves connections to nobody in the pool."""


@dataclass(frozen=True, slots=True)
class _Request:
    """`until` (time.monotonic()) is when the whole answer must be there. A stream has `idle_s` instead: how long
    nothing may arrive."""

    method: str
    url: str
    until: float | None
    body: bytes | None = None
    content_type: str = JSON
    idle_s: float | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether it does no harm that it may have arrived before. Only a POST is something else the second time: a PUT
        names the version that it replaces, a DELETE the UID, and a PATCH holds values, not changes of values."""
        return self.method != "POST"

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.until is not None and time.monotonic() >= self.until

    def timeout(self, most_s: float) -> urllib3.Timeout:
        """Of one attempt that begins now, and in which the head of a stream must come within `most_s`.

        Raises: TimeoutError."""
        if self.until is None:
            head_s = None if self.idle_s is None else min(self.idle_s, most_s)
            return urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=head_s)
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time was left to ask the API server")
        return urllib3.Timeout(connect=min(left, CONNECT_TIMEOUT_S), read=left)


@dataclass(eq=False)
class ApiClient:
    """One API server. Every method may be called from any thread.

    Raises from every call: ApiUnavailableError (retry later) and ApiRejectedError (`.status`, `.reason`).

    `observe` hears of each request: its method, and the status of the answer or None if there was none;
    `headers` go with each request; `warned` hears what the server warns of in answers to `request`.
    """

    endpoint: Endpoint
    _: KW_ONLY
    timeout_s: float = DEFAULT_TIMEOUT_S
    limiter: TokenBucket | None = None
    observe: Callable[[str, int | None], None] | None = None
    headers: Mapping[str, str] | None = None
    warned: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self._headers = {"User-Agent": USER_AGENT, "Accept": JSON, **(self.headers or {})}
        self._lock = threading.Lock()
        self._pool: urllib3.PoolManager | None = None
        self._pool_of: tuple[Any, ...] = ()

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
        """The decoded answer; `action` (such as "get claim ns/name") starts every error text. Everything together, from
        the wait for the limit of requests to the last byte, takes `timeout_s` at most."""
        until = self._until(timeout_s)
        with api_errors(action, self.endpoint):
            data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            response = self._send(_Request(method, self._url(path, query), until, data, content_type))
            check_status(action, response)
            if self.warned is not None:
                for header in response.headers.getlist("Warning"):
                    self.warned(warning_text(header))
            decoded = decoded_json(response.data or b"{}", action)
        return decoded if isinstance(decoded, dict) else {"items": decoded}

    def text(self, path: str, *, action: str, timeout_s: float | None = None) -> str:
        """What a path answers that serves no object, such as a pod behind the server's proxy."""
        with api_errors(action, self.endpoint):
            response = self._send(_Request("GET", self._url(path, None), self._until(timeout_s)))
            check_status(action, response)
            return (response.data or b"").decode(errors="replace")

    def watch(
        self, path: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch; the stream breaks if nothing, not even a bookmark, arrives for `idle_timeout_s`. The first
        attempt to start it has the limit of any request, since an API server answers at once."""
        with api_errors(action, self.endpoint):
            response = self._send(_Request("GET", self._url(path, query), None, idle_s=idle_timeout_s))
            try:
                if response.status >= 300:
                    response.read(cache_content=True)
                check_status(action, response)
            except BaseException:
                response.close()
                raise
        return WatchStream(response, action)

    def close(self) -> None:
        """Close idle connections; calls under way end by themselves."""
        with self._lock:
            if self._pool is not None:
                self._pool.clear()
                self._pool = None

    def _send(self, wanted: _Request) -> urllib3.BaseHTTPResponse:
        token = self.endpoint.token
        used = token.header()
        response = self._send_repeated(wanted)
        if response.status == 401 and token.refresh(used):
            response.drain_conn()
            response = self._send_repeated(wanted)
        return response

    def _send_repeated(self, wanted: _Request) -> urllib3.BaseHTTPResponse:
        """The second attempt has a fresh connection, and all the time that is left: the server may be slow."""
        try:
            return self._send_once(wanted, ATTEMPT_S if wanted.is_repeatable else math.inf)
        except (ProtocolError, ReadTimeoutError):
            if not wanted.is_repeatable or wanted.is_over:
                raise  # a POST may have arrived: the caller looks at the server first
        return self._send_once(wanted)

    def _send_once(self, wanted: _Request, most_s: float = math.inf) -> urllib3.BaseHTTPResponse:
        if self.limiter is not None:
            self.limiter.acquire(math.inf if wanted.until is None else wanted.until - time.monotonic())
        if wanted.until is not None:
            wanted = replace(wanted, until=min(wanted.until, time.monotonic() + most_s))
        pool = self._pool_now()
        status: int | None = None
        try:
            with answered_by(wanted.until, wanted.idle_s):
                response = pool.urlopen(
                    wanted.method,
                    wanted.url,
                    body=wanted.body,
                    headers=self._request_headers(wanted),
                    timeout=wanted.timeout(most_s),
                    retries=False,
                    redirect=False,
                    preload_content=wanted.until is not None,
                )
            status = response.status
        except (ProtocolError, ReadTimeoutError):
            self._leave(pool)
            raise
        finally:
            if self.observe is not None:
                self.observe(wanted.method, status)
        return response

    def _leave(self, pool: urllib3.PoolManager) -> None:
        """Begin a new pool: the other connections of this one may end at the same peer, which is gone. It is not
        cleared: other threads may be about to take a connection of it. Its last user closes them."""
        with self._lock:
            if self._pool is pool:
                self._pool = None

    def _request_headers(self, wanted: _Request) -> dict[str, str]:
        """Made anew for each attempt: the token may have been renewed in between."""
        headers = dict(self._headers)
        token = self.endpoint.token.header()
        if token:
            if not (token.isascii() and token.isprintable()):  # the complaint of http.client would show it
                raise ApiUnavailableError(
                    f"the bearer token of {self.endpoint.origin} has characters that no token has; renew it"
                )
            headers["Authorization"] = token
        if wanted.body is not None:
            headers["Content-Type"] = wanted.content_type
        return headers

    def _pool_now(self) -> urllib3.PoolManager:
        """The pool; a new one once a certificate or CA file was replaced."""
        current = self.endpoint.tls.fingerprint()
        with self._lock:
            if self._pool is None or current != self._pool_of:
                old, self._pool = self._pool, self._new_pool()
                self._pool_of = current
                if old is not None:
                    old.clear()
            return self._pool

    def _new_pool(self) -> urllib3.PoolManager:
        options: dict[str, Any] = {"num_pools": 2, "maxsize": POOL_SIZE, "socket_options": _socket_options()}
        tls = self.endpoint.tls
        if self.endpoint.server.startswith("https://"):
            options["ssl_context"] = tls.context()
            if tls.server_name:
                options |= {"server_hostname": tls.server_name, "assert_hostname": tls.server_name}
            if tls.insecure:
                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
                options |= {"assert_hostname": False}
        proxy = self.endpoint.proxy
        if proxy is not None:
            headers = None
            if proxy.credentials:
                # As Go does; urllib3 would write the text in Latin-1, and fail where that cannot be.
                credentials = base64.b64encode(proxy.credentials.encode()).decode()
                headers = {"proxy-authorization": f"Basic {credentials}"}
            return time_answers(urllib3.ProxyManager(proxy.url, proxy_headers=headers, **options))
        return time_answers(urllib3.PoolManager(**options))

    def _url(self, path: str, query: Mapping[str, str] | None) -> str:
        return self.endpoint.server + path + (f"?{urlencode(query)}" if query else "")

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)


def _socket_options() -> list[tuple[int, int, int]]:
    """A peer that vanished is noticed after ATTEMPT_S, or 20 s after its last byte where nothing is sent, as on a
    watch."""
    return [
        *HTTPConnection.default_socket_options,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(ATTEMPT_S * 1000)),
    ]


def path_segment(name: str) -> str:
    """A name as one segment of a URL path: it cannot lead to another object.

    Raises: ApiRejectedError (400) for what no object can be called.
    """
    if name in ("", ".", ".."):
        raise ApiRejectedError(
            f"{name!r} cannot be the name of an API object", status=400, reason="BadRequest"
        )
    return quote(name, safe="")


def warning_text(header: str) -> str:
    """What a Warning header says: the text of `299 - "the text"`, quotes and backslashes unescaped."""
    quoted = re.match(r'\d+ \S+ "((?:[^"\\]|\\.)*)"', header)
    return re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else header


def is_not_found(error: BaseException) -> bool:
    """Whether the API server said that the object does not exist."""
    return isinstance(error, ApiRejectedError) and error.status == 404
