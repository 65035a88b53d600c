"""Requests to the API server through the official Python client: plain dicts, one error map, limits in time and size.

The official client's typed API classes stay out: CoreV1Api alone costs 66 MiB.
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
"""Whose writes ours are in `metadata.managedFields`, unless a request says otherwise: how the user agent begins."""
USER_AGENT = f"{FIELD_MANAGER}/{dra_driver.__version__}"
GROUP = "resource.k8s.io"
GROUP_VERSION = f"{GROUP}/v1"
"""Kubernetes serves it from 1.34 on."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
DEFAULT_TIMEOUT_S = 10.0
POOL_SIZE = 16
CONNECT_TIMEOUT_S = 5.0
ATTEMPT_S = 8.0
"""How long the first attempt of a request may take, and how long a peer may leave what was sent unacknowledged: an API
server that vanishes without a RST leaves connections to nobody in the pool."""
MAX_BYTES = 32 * 1024 * 1024
"""No answer and no event may be larger: the daemon's container has a memory limit of 256 MiB."""
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class _Request:
    """`until` (time.monotonic()) is when the whole answer must be there. A watch has `idle_s` instead: how long nothing
    may arrive."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: Any = None
    content_type: str = JSON
    until: float = math.inf
    idle_s: float = math.inf

    @property
    def is_repeatable(self) -> bool:
        """Whether it does no harm that it may have arrived before. Only a POST is something else the second time: a PUT
        names the version that it replaces, a DELETE the UID, and a PATCH holds values, not changes of values."""
        return self.method != "POST"


@dataclass(eq=False)
class ApiClient:
    """One API server. Every method may be called from any thread.

    Raises from every call: ApiUnavailableError (retry later) and ApiRejectedError (`.status`, `.reason`).

    `observe` hears of each request: its method, and the status of the answer or None if there was none;
    `headers` go with each request.
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
        self._now()

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
        """A request to resource.k8s.io; `more` is as for `request`."""
        return self.request(method, group_path(plural, namespace, name, subresource), **more)

    def check_group(self) -> None:
        """Ask whether the server has resource.k8s.io. Raises: PathNotFoundError if it has not."""
        self.request("GET", f"/apis/{GROUP_VERSION}", action=f"ask for {GROUP_VERSION}")

    def text(self, path: str, *, action: str, timeout_s: float | None = None) -> str:
        """What a path answers that serves no object, such as a pod behind the server's proxy."""
        return self._answer(_Request("GET", path, until=self._until(timeout_s)), action)[1].decode(
            errors="replace"
        )

    def watch(
        self, path: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch; the stream breaks if nothing, not even a bookmark, arrives for `idle_timeout_s`. The first
        attempt to start it has the limit of any request, since an API server answers at once."""
        response, _ = self._answer(_Request("GET", path, query, idle_s=idle_timeout_s), action)
        return WatchStream(response, action)

    def close(self) -> None:
        """Close idle connections; calls under way end by themselves."""
        with self._lock:
            if self._official is not None:
                self._official.close()
                self._official = None

    def _answer(self, wanted: _Request, action: str) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        """A good answer and its body, which is empty for a watch: that is read later. Raises: as every call."""
        with api_errors(action):
            used = self.endpoint.configuration
        with api_errors(action, used.proxy):
            response, data = self._send_repeated(wanted)
            if response.status == 401:
                self.endpoint.read_again(used)
                response, data = self._send_repeated(wanted)
            try:
                check_status(action, response, data)
            except PathNotFoundError as error:
                if not wanted.path.startswith(f"/apis/{GROUP_VERSION}"):
                    raise
                raise PathNotFoundError(
                    f"{error}; the API server does not serve {GROUP_VERSION}, or something before it does not pass it"
                    " on: use Kubernetes 1.34 or later",
                    status=error.status,
                    reason=error.reason,
                ) from error
        return response, data

    def _send_repeated(self, wanted: _Request) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        """The second attempt has a fresh connection, and all the time that is left: the server may be slow."""
        try:
            return self._send_once(wanted, ATTEMPT_S if wanted.is_repeatable else math.inf)
        except (ProtocolError, ReadTimeoutError):
            if not wanted.is_repeatable or time.monotonic() >= wanted.until:
                raise  # a POST may have arrived: the caller looks at the server first
        return self._send_once(wanted, math.inf)

    def _send_once(self, wanted: _Request, max_s: float) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        if self.limiter is not None:
            self.limiter.acquire(wanted.until - time.monotonic())
        until = min(wanted.until, time.monotonic() + max_s)
        official = self._now()
        status: int | None = None
        try:
            response = self._opened(official, wanted, until)
            status = response.status
            if wanted.until < math.inf or status >= 300:
                return response, _body(response, min(until, time.monotonic() + wanted.idle_s))
            _wait_at_most(response, wanted.idle_s)
            return response, b""
        except (ProtocolError, ReadTimeoutError):
            self._leave(official)
            raise
        finally:
            if self.observe is not None:
                self.observe(wanted.method, status)

    def _opened(
        self, official: kubernetes.client.ApiClient, wanted: _Request, until: float
    ) -> urllib3.BaseHTTPResponse:
        """The answer whose head has arrived. Raises: what urllib3 raises."""
        from kubernetes.client import ApiException

        left = min(until - time.monotonic(), wanted.idle_s)
        if left <= 0:
            raise TimeoutError("no time was left to ask the API server")
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
        except ApiException as error:  # so it reports trouble with TLS, as a text of several lines
            raise error.__context__ or error from None
        response: urllib3.BaseHTTPResponse = answer.response
        return response

    def _authorization(self, official: kubernetes.client.ApiClient) -> dict[str, str]:
        """The header of that name. The configuration reads its token again when it is a minute old or has expired.

        Raises: ApiUnavailableError for what no header can carry.
        """
        with contextlib.suppress(Exception):  # the last token is valid for a while yet
            official.configuration.auth_settings()
        token = str(official.configuration.api_key.get("BearerToken") or "").strip()
        if not (token.isascii() and token.isprintable()):  # the complaint of http.client would show it
            raise ApiUnavailableError(
                f"the bearer token of {self.endpoint.origin} has characters that no token has; renew it"
            )
        return {"Authorization": token} if token else {}

    def _leave(self, official: kubernetes.client.ApiClient) -> None:
        """Begin a new pool: the other connections of this one may end at the same peer, which is gone. It is not
        cleared: other threads may be about to take a connection of it. Its last user closes them."""
        with self._lock:
            if self._official is official:
                self._official = None

    def _now(self) -> kubernetes.client.ApiClient:
        """The official client; a new one once the configuration or the file of the CA is another. Raises:
        InvalidConfigError."""
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
                    " give them as PEM"
                ) from error
            client.rest_client.pool_manager.connection_pool_kw["ssl_context"] = context
        return client

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)


def _tls_context(configuration: kubernetes.client.Configuration) -> ssl.SSLContext:
    """Raises: OSError (ssl.SSLError is one) if a file is missing or is not PEM."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    # Python 3.13 began to refuse CAs without key identifiers; Kubernetes installers make such CAs.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        context.check_hostname = False
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


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


def _body(response: urllib3.BaseHTTPResponse, until: float) -> bytes:
    """The whole body. urllib3 alone would wait for each piece as long as for the first, and read without a limit.

    Raises: ReadTimeoutError once it is `until` (time.monotonic()), HTTPError for more than MAX_BYTES.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        while size <= MAX_BYTES:
            left = until - time.monotonic()
            if left <= 0:
                raise ReadTimeoutError(None, None, "the answer was not complete in time")  # type: ignore[arg-type]
            _wait_at_most(response, left)
            piece = response.read1(_READ_BYTES)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
        raise HTTPError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
    except BaseException:
        response.close()
        raise


def _wait_at_most(response: urllib3.BaseHTTPResponse, seconds: float) -> None:
    """Limit each wait for bytes of the body from now on."""
    sock = getattr(response.connection, "sock", None)
    if sock is not None:  # None once the server has said that it will close the connection
        sock.settimeout(seconds)


class WatchStream:
    """Iterate for events ({"type", "object"}); `close()` from any thread ends the iteration at once.

    Ends silently when the server closes the watch in order. Raises while iterating: ApiUnavailableError
    when the connection breaks or stays silent too long, and for an ERROR event as for an answer of its code.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, action: str) -> None:
        self._response = response
        self._action = action
        self._closed = threading.Event()

    def close(self) -> None:
        """Wake the reader, if there is one, and make it end."""
        self._closed.set()
        # Not response.close(): that would wait for the lock that the reader holds.
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
    """A name as one segment of a URL path: it cannot lead to another object.

    Raises: ApiRejectedError (400) for what no object can be called.
    """
    if name in ("", ".", ".."):
        raise ApiRejectedError(
            f"{name!r} cannot be the name of an API object", status=400, reason="BadRequest"
        )
    return quote(name, safe="")


def is_not_found(error: BaseException) -> bool:
    """Whether the API server said that the object does not exist."""
    return isinstance(error, ApiRejectedError) and error.status == 404


def group_path(plural: str, namespace: str | None = None, *rest: str | None) -> str:
    """URL path in resource.k8s.io of a collection, object or subresource.

    Raises: ApiRejectedError for an impossible name.
    """
    inside = ["namespaces", path_segment(namespace)] if namespace is not None else []
    named = [path_segment(part) for part in rest if part is not None]
    return "/".join(["/apis", GROUP_VERSION, *inside, plural, *named])
