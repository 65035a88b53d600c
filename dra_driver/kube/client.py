"""Sends requests to the API server through the official Python client, with plain dicts, mapped errors, and limits
for time and size.

The official client's typed API classes are not used, because CoreV1Api alone costs 66 MiB.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

import dra_driver
from dra_driver.base.atomic import stamp_or_none
from dra_driver.base.backoff import TokenBucket
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.kube.api_errors import (
    PathNotFoundError,
    api_errors,
    check_status,
    decoded_json,
    failure,
    one_line,
)
from dra_driver.kube.endpoint import Endpoint

if TYPE_CHECKING:
    import kubernetes.client

FIELD_MANAGER = "gpu-dra-driver"
"""The default owner of the plugin's writes in `metadata.managedFields`: the beginning of the user agent."""
USER_AGENT = f"{FIELD_MANAGER}/{dra_driver.__version__}"
GROUP = "resource.k8s.io"
GROUP_VERSION = f"{GROUP}/v1"
"""API servers have served this version since Kubernetes 1.34."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
DEFAULT_TIMEOUT_S = 10.0
POOL_SIZE = 16
CONNECT_TIMEOUT_S = 5.0
ATTEMPT_S = 8.0
"""How long the first attempt of a request may take, and how long sent data may stay unacknowledged. An API server
that vanishes without a RST leaves dead connections in the pool.
"""
MAX_BYTES = 32 * 1024 * 1024
"""The maximum size of a response or event, because the daemon's container has a memory limit of 256 MiB."""
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class _Request:
    """A request. The complete response must arrive by `until` (time.monotonic()).

    A watch has `idle_s` instead: the maximum time without data.
    """

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: Any = None
    content_type: str = JSON
    until: float = math.inf
    idle_s: float = math.inf

    @property
    def is_repeatable(self) -> bool:
        """Whether the request can be repeated safely, even if the first attempt arrived.

        Only a POST cannot: a PUT names the version that it replaces, a DELETE the UID, and a PATCH contains
        absolute values.
        """
        return self.method != "POST"


@dataclass(eq=False)
class ApiClient:
    """A client for one API server. Thread-safe.

    Every call raises ApiUnavailableError (retry later) or ApiRejectedError (`.status`, `.reason`). `observe` is
    called for each request with its method and the status of the response (None without a response). `headers`
    are sent with each request.
    """

    endpoint: Endpoint
    _: KW_ONLY
    timeout_s: float = DEFAULT_TIMEOUT_S
    limiter: TokenBucket | None = None
    observe: Callable[[str, int | None], None] | None = None
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._official: kubernetes.client.ApiClient | None = None
        self._made_from: tuple[Any, ...] = ()

    def open(self) -> None:
        """Import the official client and read the configuration. Raises: InvalidConfigError."""
        self._current()

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
        """Send a request and return the decoded response. Every error message begins with `action`, such as
        "get claim ns/name".

        The call takes at most `timeout_s`, including the wait for the rate limit.
        """
        wanted = _Request(method, path, query, body, content_type, self._until(timeout_s))
        _, data = self._answer(wanted, action)
        decoded = decoded_json(data or b"{}", action)
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
        """Send a request to resource.k8s.io. `more` is passed to `request`."""
        return self.request(method, group_path(plural, namespace, name, subresource), **more)

    def check_group(self) -> None:
        """Check that the server serves resource.k8s.io. Raises: PathNotFoundError if it does not."""
        self.request("GET", f"/apis/{GROUP_VERSION}", action=f"get {GROUP_VERSION}")

    def text(self, path: str, *, action: str, timeout_s: float | None = None) -> str:
        """Return the text of a path that does not serve an object, such as a pod's page through the server's proxy."""
        return self._answer(_Request("GET", path, until=self._until(timeout_s)), action)[1].decode(
            errors="replace"
        )

    def watch(
        self, path: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch. The stream breaks if nothing arrives for `idle_timeout_s`, not even a bookmark.

        The first attempt has the time limit of other requests, because an API server responds immediately.
        """
        response, _ = self._answer(_Request("GET", path, query, idle_s=idle_timeout_s), action)
        return WatchStream(response, action)

    def close(self) -> None:
        """Close idle connections. Calls in progress continue."""
        with self._lock:
            if self._official is not None:
                self._official.close()
                self._official = None

    def _answer(self, wanted: _Request, action: str) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        """Return a successful response and its body; for a watch, the body is empty here, and is read later.
        Raises: like every call.
        """
        with api_errors(action):
            used = self.endpoint.configuration
        with api_errors(action, used.proxy):
            response, data = self._send_repeated(wanted)
            if response.status == 401:
                self.endpoint.reload(used)
                response, data = self._send_repeated(wanted)
            try:
                check_status(action, response, data)
            except PathNotFoundError as error:
                if not wanted.path.startswith(f"/apis/{GROUP_VERSION}"):
                    raise
                raise PathNotFoundError(
                    f"{error}; the API server does not serve {GROUP_VERSION}, or a proxy does not forward it:"
                    " use Kubernetes 1.34 or later",
                    status=error.status,
                    reason=error.reason,
                ) from error
        return response, data

    def _send_repeated(self, wanted: _Request) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        """Send a request, twice if necessary. The second attempt uses a new connection and all remaining time."""
        try:
            return self._send_once(wanted, ATTEMPT_S if wanted.is_repeatable else math.inf)
        except (ProtocolError, ReadTimeoutError):
            if not wanted.is_repeatable or time.monotonic() >= wanted.until:
                raise  # a POST may have arrived, so the caller must check first
        return self._send_once(wanted, math.inf)

    def _send_once(self, wanted: _Request, max_s: float) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        if self.limiter is not None:
            self.limiter.acquire(wanted.until - time.monotonic())
        until = min(wanted.until, time.monotonic() + max_s)
        official = self._current()
        status: int | None = None
        try:
            response = self._opened(official, wanted, until)
            status = response.status
            if wanted.until < math.inf or status >= 300:
                return response, _body(response, min(until, time.monotonic() + wanted.idle_s))
            _wait_at_most(response, wanted.idle_s)
            return response, b""
        except (ProtocolError, ReadTimeoutError):
            self._drop_pool(official)
            raise
        finally:
            if self.observe is not None:
                self.observe(wanted.method, status)

    def _opened(
        self, official: kubernetes.client.ApiClient, wanted: _Request, until: float
    ) -> urllib3.BaseHTTPResponse:
        """Return the response once its headers have arrived. Raises: the errors of urllib3."""
        from kubernetes.client import ApiException

        left = min(until - time.monotonic(), wanted.idle_s)
        if left <= 0:
            raise TimeoutError("the time limit was reached before the request was sent to the API server")
        method, url, headers, _, _ = official.param_serialize(
            wanted.method,
            wanted.path,
            query_params=dict(wanted.query or {}),
            header_params={"Accept": JSON, **(self.headers or {})},
        )
        headers |= self._authorization(official)
        if wanted.body is not None:
            headers["Content-Type"] = wanted.content_type
        try:
            answer = official.call_api(
                method, url, headers, wanted.body, _request_timeout=(min(left, CONNECT_TIMEOUT_S), left)
            )
        except ApiException as error:  # the client reports TLS errors this way, as text with several lines
            raise error.__context__ or error from None
        response: urllib3.BaseHTTPResponse = answer.response
        return response

    def _authorization(self, official: kubernetes.client.ApiClient) -> dict[str, str]:
        """Return the Authorization header. The configuration reads its token again when the token is a minute old
        or has expired.

        Raises: ApiUnavailableError if the token cannot be sent in a header.
        """
        with contextlib.suppress(Exception):  # the last token remains valid for a while
            official.configuration.auth_settings()
        token = str(official.configuration.api_key.get("BearerToken") or "").strip()
        if not (
            token.isascii() and token.isprintable()
        ):  # http.client's error message would contain the token
            raise ApiUnavailableError(
                f"the bearer token of {self.endpoint.origin} has invalid characters; renew it"
            )
        return {"Authorization": token} if token else {}

    def _drop_pool(self, official: kubernetes.client.ApiClient) -> None:
        """Start a new connection pool, because other connections of this pool may lead to the same dead peer.

        The old pool is not closed here, because other threads may be about to use it. It closes after its last use.
        """
        with self._lock:
            if self._official is official:
                self._official = None

    def _current(self) -> kubernetes.client.ApiClient:
        """Return the official client; a new one if the configuration or the CA file has changed. Raises:
        InvalidConfigError.
        """
        configuration = self.endpoint.configuration
        ca = configuration.ssl_ca_cert
        wanted = (configuration, ca and stamp_or_none(ca))
        with self._lock:
            if self._official is None or self._made_from != wanted:
                self._official, self._made_from = self._new_official(configuration), wanted
            return self._official

    def _new_official(self, configuration: kubernetes.client.Configuration) -> kubernetes.client.ApiClient:
        from kubernetes.client import ApiClient as OfficialClient

        configuration.connection_pool_maxsize = POOL_SIZE
        configuration.socket_options = _socket_options()
        client = OfficialClient(configuration)
        client.user_agent = USER_AGENT
        if configuration.host.startswith("https://"):
            try:
                context = _tls_context(configuration)
            except (OSError, ValueError) as error:
                raise InvalidConfigError(
                    f"{self.endpoint.origin}: the CA, the client certificate or its key cannot be loaded: {error};"
                    " they must be PEM files"
                ) from error
            client.rest_client.pool_manager.connection_pool_kw["ssl_context"] = context
        return client

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)


def _tls_context(configuration: kubernetes.client.Configuration) -> ssl.SSLContext:
    """Raises: OSError (including ssl.SSLError) if a file is missing or is not PEM."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    # Python 3.13 rejects CAs without key identifiers, but Kubernetes installers create such CAs.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        context.check_hostname = False
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _socket_options() -> list[tuple[int, int, int]]:
    """Return options that detect a vanished peer after ATTEMPT_S, or 20 s after its last byte if nothing is
    sent, as on a watch.
    """
    return [
        *HTTPConnection.default_socket_options,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(ATTEMPT_S * 1000)),
    ]


def _body(response: urllib3.BaseHTTPResponse, until: float) -> bytes:
    """Read the whole body. urllib3 alone would apply the timeout to each chunk, and has no size limit.

    Raises: ReadTimeoutError at `until` (time.monotonic()); HTTPError for more than MAX_BYTES.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        while size <= MAX_BYTES:
            left = until - time.monotonic()
            if left <= 0:
                raise ReadTimeoutError(None, None, "the response was not complete in time")  # type: ignore[arg-type]
            _wait_at_most(response, left)
            piece = response.read1(_READ_BYTES)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
        raise HTTPError(f"the response is larger than {MAX_BYTES >> 20} MiB")
    except BaseException:
        response.close()
        raise


def _wait_at_most(response: urllib3.BaseHTTPResponse, seconds: float) -> None:
    """Limit each further wait for bytes of the body."""
    sock = getattr(response.connection, "sock", None)
    if sock is not None:  # None if the server has announced that it will close the connection
        sock.settimeout(seconds)


class WatchStream:
    """Iterates over events ({"type", "object"}). `close()` from any thread ends the iteration at once.

    The iteration ends silently if the server closes the watch normally. It raises ApiUnavailableError if the
    connection breaks or is silent for too long. For an ERROR event, it raises the error for the event's code.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, action: str) -> None:
        self._response = response
        self._action = action
        self._closed = threading.Event()

    def close(self) -> None:
        """Wake the reader, if there is one, and end its iteration."""
        self._closed.set()
        # Not response.close(), which would wait for a lock that the reader holds.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with api_errors(self._action):
                for line in self._lines():
                    yield self._event(line)
        except ApiUnavailableError:
            if not self._closed.is_set():
                raise
        finally:
            self._closed.set()
            self._response.close()

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._response.stream(_READ_BYTES):
            if self._closed.is_set():
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line for line in lines if line)
            if len(rest) > MAX_BYTES:
                raise HTTPError(f"an event is larger than {MAX_BYTES >> 20} MiB")
        if rest and not self._closed.is_set():
            raise HTTPError("connection to the API server broke in the middle of an event")

    def _event(self, line: bytes) -> dict[str, Any]:
        event = decoded_json(line, self._action)
        if not isinstance(event, dict):
            raise ApiUnavailableError(f"{self._action}: an event of the watch is not an object")
        if event.get("type") != "ERROR":
            return event
        status = event.get("object")
        status = status if isinstance(status, dict) else {}
        code = status.get("code")
        code = code if isinstance(code, int) else 500
        text = f"{self._action}: {one_line(str(status.get('message') or 'watch failed'))} (HTTP {code})"
        raise failure(text, code, status)


def path_segment(name: str) -> str:
    """Return a name as one segment of a URL path, so that it cannot lead to another object.

    Raises: ApiRejectedError (400) if no object can have this name.
    """
    if name in ("", ".", ".."):
        raise ApiRejectedError(
            f"{name!r} cannot be the name of an API object", status=400, reason="BadRequest"
        )
    return quote(name, safe="")


def is_not_found(error: BaseException) -> bool:
    """Whether the request failed with 404: the object does not exist, or the server does not serve the path."""
    return isinstance(error, ApiRejectedError) and error.status == 404


def group_path(plural: str, namespace: str | None = None, *rest: str | None) -> str:
    """Return the URL path of a collection, object or subresource in resource.k8s.io.

    Raises: ApiRejectedError if no object can have one of the names.
    """
    inside = ["namespaces", path_segment(namespace)] if namespace is not None else []
    named = [path_segment(part) for part in rest if part is not None]
    return "/".join(["/apis", GROUP_VERSION, *inside, plural, *named])
