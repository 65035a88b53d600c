"""The HTTP endpoint: metrics, and health with its reasons in the body."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dra_driver.errors import FatalError, InvalidConfigError

_log = structlog.get_logger(__name__)

Page = Callable[[], "Response"]

_MOST_CONNECTIONS = 64
_MOST_THREADS = 2 * _MOST_CONNECTIONS
"""A thread counts until it has made its page, also after its connection was closed."""

_LOOK_FOR_STOP_EVERY_S = 60.0
_STOP_S = 5.0
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
"""The errors if the kernel has no IPv6, or no interface has it."""


class Response(NamedTuple):
    """What a page returns."""

    status: int
    content_type: str
    body: bytes


def problems_page(
    problems: Callable[[], Sequence[str]], notes: Callable[[], Sequence[str]] | None = None
) -> Page:
    """200 `ok` while there is no problem, else 503 with one problem on each line. Then the notes, which do not change
    the status."""

    def page() -> Response:
        found = problems()
        noted = notes() if notes is not None else ()
        lines = [*(found or ["ok"]), *(f"note: {note}" for note in noted)]
        return Response(503 if found else 200, _TEXT, "".join(f"{line}\n" for line in lines).encode())

    return page


def json_page(document: Callable[[], bytes]) -> Page:
    """200 with a JSON document."""
    return lambda: Response(200, "application/json", document())


def metrics_page(registry: CollectorRegistry) -> Page:
    """What Prometheus scrapes."""
    encode, content_type = choose_encoder("")
    return lambda: Response(200, content_type, encode(registry))


_TEXT = "text/plain; charset=utf-8"
_NOT_FOUND = Response(404, _TEXT, b"not found\n")
_FAILED = Response(500, _TEXT, b"internal error; see the log of gpu-dra-driver\n")


class HttpEndpoint:
    """Serves GET on `pages` by path, at `address` in the form `host:port`, `[IPv6]:port` or `:port`.

    Without a host, and with `[::]`, it serves IPv4 and IPv6 clients on one port: the kubelet probes a pod at its first
    address, which is an IPv6 address in many clusters.
    """

    def __init__(self, address: str, pages: Mapping[str, Page]) -> None:
        host, port = split_address(address)
        try:
            self._server = _listen(host, port, _handler(pages))
        except OSError as error:
            raise FatalError(
                f"cannot serve HTTP on {address}: {error.strerror}; choose another --http-endpoint"
            ) from error
        serve = partial(self._server.serve_forever, _LOOK_FOR_STOP_EVERY_S)
        self._thread = threading.Thread(target=serve, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port in use; it differs from the wanted port if that was 0."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the socket."""
        if self._thread.ident is not None:
            ending = threading.Thread(target=self._server.shutdown, daemon=True)
            ending.start()
            deadline = time.monotonic() + _STOP_S
            while ending.is_alive() and time.monotonic() < deadline:
                # The server looks seldom whether it shall stop: it costs nothing at rest. This ends its wait.
                with suppress(OSError):
                    self._server.socket.shutdown(socket.SHUT_RDWR)
                ending.join(timeout=0.05)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each connection. The number of connections is small: one connection too many closes the oldest.

    If the newest were refused instead, a client that sends a byte now and then could keep the probes out. The newest is
    refused only while too many threads still make pages for closed connections.
    """

    daemon_threads = True

    def __init__(
        self, family: socket.AddressFamily, address: Any, handler: type[BaseHTTPRequestHandler]
    ) -> None:
        self.address_family = family
        self._open: dict[Any, None] = {}  # oldest first
        self._at_work = 0
        self._open_lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind, but do not ask DNS for the name of this host: DNS may not answer, and the name is not needed."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        if not self._take_in(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # out of threads; the caller closes the connection
            with self._open_lock:
                self._at_work -= 1
            raise

    def _take_in(self, request: Any) -> bool:
        with self._open_lock:
            if self._at_work >= _MOST_THREADS:
                return False
            self._at_work += 1
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes it
            self._open[request] = None
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve the connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._open_lock:
                self._at_work -= 1

    def close_request(self, request: Any) -> None:
        """Close a connection; the client may have closed it already."""
        with self._open_lock:
            self._open.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no traceback for a client that hangs up."""
        _log.debug("http_client_lost", client=str(client_address), exc_info=True)


def split_address(address: str) -> tuple[str, int]:
    """`(host, port)` of `host:port` or `[IPv6]:port`; an empty host means all addresses. Raises: InvalidConfigError."""
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in host) != is_bracketed:
        raise InvalidConfigError(
            f"{address!r} is not an address; expected host:port or :port, for example :8080, with an IPv6 host in "
            "brackets, for example [::1]:8080"
        )
    return host.strip("[]"), int(port)


def _listen(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    """A server at the first address of `host`; at all addresses of both families where it is empty. Raises: OSError."""
    if not host:
        try:
            return _Server(socket.AF_INET6, ("::", port), handler)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            return _Server(socket.AF_INET, ("", port), handler)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return _Server(family, address, handler)


def _handler(pages: Mapping[str, Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            answer = _answer(path, pages.get(path))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no line for each request."""

    return Handler


def _answer(path: str, page: Page | None) -> Response:
    if page is None:
        return _NOT_FOUND
    try:
        return page()
    except Exception:  # noqa: BLE001  goes to the log; the other pages stay up
        _log.exception("page_failed", path=path)
        return _FAILED
