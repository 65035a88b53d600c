"""Connections to the API server through urllib3: TLS, proxy, and limits for the time and size of a response."""

from __future__ import annotations

import io
import math
import socket
import ssl
import tempfile
import time
from http.client import HTTPResponse
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.util import Timeout

from dra_driver.kube.decoding import MAX_BYTES, TooLargeError
from dra_driver.model.dataclass import dataclass, field

_POOL_SIZE = 16
CONNECT_TIMEOUT_S = 5.0
UNACKNOWLEDGED_S = 8.0
_READ_BYTES = 65536
_SHORTEST_S = 0.001  # a timeout of 0 would make a socket non-blocking


@dataclass(frozen=True, slots=True)
class Route:
    """Equal routes can share connections.

    `server` and `proxy` are URLs without credentials, such as `https://10.96.0.1:443`. `ca`, `certificate` and `key`
    are PEM. `proxy_authorization` is a header's value.
    """

    server: str
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    verify: bool = True
    server_name: str | None = None
    proxy: str | None = None
    proxy_authorization: str = field(default="", repr=False)


def new_manager(route: Route) -> urllib3.PoolManager:
    """Return a pool of connections. Raises: OSError (including ssl.SSLError), ValueError if the CA, certificate or key
    is not PEM.
    """
    more: dict[str, Any] = {
        "maxsize": _POOL_SIZE,
        "socket_options": _socket_options(),
        "retries": False,
    }
    if route.server.startswith("https://"):
        more |= {"ssl_context": _tls_context(route), "server_hostname": route.server_name}
    manager: urllib3.PoolManager
    if route.proxy is None:
        manager = urllib3.PoolManager(**more)
    else:
        headers = {"Proxy-Authorization": route.proxy_authorization} if route.proxy_authorization else None
        # The proxy has a certificate of its own, so the cluster's CA does not apply to it.
        tls = ssl.create_default_context() if route.proxy.startswith("https://") else None
        manager = urllib3.ProxyManager(route.proxy, proxy_headers=headers, proxy_ssl_context=tls, **more)
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return manager


def opened(
    manager: urllib3.PoolManager,
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes | None,
    left_s: float,
) -> urllib3.BaseHTTPResponse:
    """Send a request, and return the response once its headers have arrived, within `left_s` seconds.

    Raises: the errors of urllib3; HTTPError if the response is compressed, because it could be of any size.
    """
    response = manager.urlopen(
        method,
        url,
        body=body,
        headers=headers,
        timeout=_Until(time.monotonic() + left_s),
        redirect=False,
        preload_content=False,
        decode_content=False,
    )
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity") and response.status < 300:
        response.close()
        raise HTTPError(
            f"the response is compressed ({encoding[:20]}), although the request did not allow that; check the proxy "
            "in front of the API server"
        )
    return response


def body_of(response: urllib3.BaseHTTPResponse) -> bytearray:
    """Read the whole body, within the time limit of `opened`; empty if it is compressed.

    Raises: the errors of urllib3; TooLargeError.
    """
    body = bytearray()
    try:
        while len(body) <= MAX_BYTES:
            piece = response.read1(_READ_BYTES)
            if not piece:
                return body if "Content-Encoding" not in response.headers else bytearray()
            body += piece
        raise TooLargeError(f"the response is larger than {MAX_BYTES >> 20} MiB")
    except BaseException:
        response.close()
        raise


def piece_of(response: urllib3.BaseHTTPResponse) -> bytes:
    return response.read1(_READ_BYTES)


def wait_for_each_piece(response: urllib3.BaseHTTPResponse, idle_s: float) -> None:
    """From now on, limit the wait for each piece of the body instead of the time for the whole response."""
    connection = response.connection
    if isinstance(connection, _Limits):
        connection.reader.until, connection.reader.idle_s = math.inf, idle_s


class _Until(Timeout):
    """A moment (time.monotonic()) at which a request ends. urllib3 would start a new `total` after a proxy's answer."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def clone(self) -> _Until:
        return self

    @property
    def connect_timeout(self) -> float:
        return min(max(self._until - time.monotonic(), _SHORTEST_S), CONNECT_TIMEOUT_S)

    @property
    def read_timeout(self) -> float | None:
        return None if math.isinf(self._until) else max(self._until - time.monotonic(), 0.0)

    def start_connect(self) -> float:
        return time.monotonic()


class _LimitedReader(io.RawIOBase):
    """Reads from a socket until a moment. The socket's own timeout would begin again with each byte."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw = sock, raw
        self.until = time.monotonic() + (sock.gettimeout() or math.inf)
        self.idle_s = math.inf

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = min(self.until - time.monotonic(), self.idle_s)
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(None if math.isinf(left) else left)
        return self._raw.readinto(buffer)

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Limits:
    """A connection whose responses must be complete in time, even those of a proxy to CONNECT.

    Its timeout holds for all of connecting: to the proxy, CONNECT, and TLS with both.
    """

    reader: _LimitedReader
    sock: Any
    timeout: Any
    _connected_by = math.inf

    def _new_conn(self) -> socket.socket:
        self._connected_by = time.monotonic() + self.timeout
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        return self._limited(made)

    def _tunnel(self) -> None:
        self._limited(self.sock)
        super()._tunnel()  # type: ignore[misc]
        self._limited(self.sock)

    def _limited(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(max(self._connected_by - time.monotonic(), _SHORTEST_S))
        return sock

    def response_class(self, sock: socket.socket, *args: Any, **more: Any) -> HTTPResponse:
        response = HTTPResponse(sock, *args, **more)
        self.reader = _LimitedReader(sock, response.fp.detach())
        response.fp = io.BufferedReader(self.reader)
        return response


class _Connection(_Limits, HTTPConnection): ...  # type: ignore[misc]


class _TlsConnection(_Limits, HTTPSConnection): ...  # type: ignore[misc]


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _tls_context(route: Route) -> ssl.SSLContext:
    ca = None if route.ca is None else route.ca.decode("ascii", "ignore")
    if ca is not None and not ca.strip():
        raise ValueError("the CA is empty")
    context = ssl.create_default_context(cadata=ca)
    # Python 3.13 rejects CAs without key identifiers, but Kubernetes installers create such CAs.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not route.verify:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if route.certificate is not None:
        # OpenSSL reads certificates only from files. Without a password it would ask the terminal for one.
        with tempfile.NamedTemporaryFile(prefix="gpu-dra-driver-") as file:
            file.write(route.certificate + b"\n" + (route.key or b""))
            file.flush()
            context.load_cert_chain(file.name, password="")
    return context


def _socket_options() -> list[tuple[int, int, int]]:
    """Return options that detect a vanished peer after 8 s, or on a silent watch 20 s after its last byte."""
    return [
        *HTTPConnection.default_socket_options,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1000)),
    ]
