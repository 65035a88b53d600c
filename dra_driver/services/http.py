"""The HTTP endpoint: metrics, and health with its reasons in the body."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple

import structlog

from dra_driver.errors import FatalError, InvalidConfigError

_log = structlog.get_logger(__name__)

Page = Callable[[], "Response"]

_MOST_CONNECTIONS = 64
_MOST_THREADS = 2 * _MOST_CONNECTIONS
"""Those of connections that were cut off while their page was made count until it is."""


class Response(NamedTuple):
    """What a page answers."""

    status: int
    content_type: str
    body: bytes


def problems_page(
    problems: Callable[[], Sequence[str]], notes: Callable[[], Sequence[str]] = lambda: ()
) -> Page:
    """200 `ok` while there is no problem, else 503 with one problem a line; then the notes, which decide nothing."""

    def page() -> Response:
        found = problems()
        lines = [*(found or ["ok"]), *(f"note: {note}" for note in notes())]
        return Response(503 if found else 200, _TEXT, "".join(f"{line}\n" for line in lines).encode())

    return page


_TEXT = "text/plain; charset=utf-8"
_NOT_FOUND = Response(404, _TEXT, b"not found\n")
_FAILED = Response(500, _TEXT, b"internal error; see the driver's log\n")


class HttpEndpoint:
    """Serves GET on `pages` by path, at `address` in the form `host:port` or `:port`."""

    def __init__(self, address: str, pages: Mapping[str, Page]) -> None:
        host, port = split_address(address)
        try:
            self._server = _Server((host, port), _handler(pages))
        except OSError as error:
            raise FatalError(
                f"cannot serve HTTP on {address}: {error.strerror}; choose another --http-endpoint"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port in use, which differs from the one asked for if that was 0."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the socket."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(timeout=5)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are few: who opens more cuts off the oldest one.

    Refusing the newest instead would let one client that sends a byte now and then keep the probes out. It is refused
    only while pages take so long that threads of connections that are gone still make theirs.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, None] = {}  # in the order of their arrival
        self._at_work = 0
        self._open_lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind, without asking DNS for the name of this host: it may be away, and nobody needs the name."""
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
        """What such a thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._open_lock:
                self._at_work -= 1

    def close_request(self, request: Any) -> None:
        """Close a connection, whoever ended it."""
        with self._open_lock:
            self._open.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are not worth a traceback."""
        _log.debug("http_client_lost", client=str(client_address), exc_info=True)


def split_address(address: str) -> tuple[str, int]:
    """`(host, port)` of `host:port`; an empty host means all addresses. Raises: InvalidConfigError."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidConfigError(f"{address!r} is no address; expected host:port or :port, for example :8080")
    return host.strip("[]"), int(port)


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
            """Scrapes are not worth a line each."""

    return Handler


def _answer(path: str, page: Page | None) -> Response:
    if page is None:
        return _NOT_FOUND
    try:
        return page()
    except Exception:  # noqa: BLE001  told in the log, and the other pages are served on
        _log.exception("page_failed", path=path)
        return _FAILED
