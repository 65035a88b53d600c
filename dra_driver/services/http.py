"""The HTTP endpoint: metrics, and health with its reasons in the body."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from dra_driver.errors import FatalError, InvalidConfigError

Page = Callable[[], "Response"]


class Response(NamedTuple):
    """What a page answers."""

    status: int
    content_type: str
    body: bytes


def problems_page(problems: Callable[[], Sequence[str]]) -> Page:
    """200 `ok` while there is no problem, else 503 with one problem a line."""

    def page() -> Response:
        found = problems()
        body = "\n".join(found) if found else "ok"
        return Response(503 if found else 200, "text/plain; charset=utf-8", f"{body}\n".encode())

    return page


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
    daemon_threads = True


def split_address(address: str) -> tuple[str, int]:
    """`(host, port)` of `host:port`; an empty host means all addresses. Raises: InvalidConfigError."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise InvalidConfigError(f"{address!r} is no address; expected host:port or :port, for example :8080")
    return host.strip("[]"), int(port)


def _handler(pages: Mapping[str, Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            answer = page() if page else Response(404, "text/plain; charset=utf-8", b"not found\n")
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line each."""

    return Handler
