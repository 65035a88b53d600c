"""A real HTTP proxy on loopback: CONNECT, and absolute URLs for plain HTTP. It may want credentials, and may refuse."""

from __future__ import annotations

import base64
import select
import socket
import ssl
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_GONE_S = 10.0


class ConnectProxy:
    """A proxy that resolves every name to one port of this machine. `asked` has all requested targets. With a
    `certificate` (and its key) it serves TLS.
    """

    def __init__(
        self, port: int, *, credentials: str | None = None, certificate: tuple[Path, Path] | None = None
    ) -> None:
        self.port_behind = port
        self.credentials = credentials
        self.refuses: int | None = None
        self.requested: list[str] = []
        handler = type("Bound", (_Handler,), {"proxy": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._http.socket = context.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust the proxy hangs up."""


class _Handler(BaseHTTPRequestHandler):
    proxy: ConnectProxy
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        if not self._is_let_through():
            return
        with socket.create_connection(("127.0.0.1", self.proxy.port_behind)) as server:
            self.send_response(200, "Connection established")
            self.end_headers()
            self.wfile.flush()
            _carry(self.connection, server)
        self.close_connection = True

    def do_GET(self) -> None:
        if not self._is_let_through():
            return
        behind = HTTPConnection("127.0.0.1", self.proxy.port_behind, timeout=_GONE_S)
        path = "/" + self.path.split("/", 3)[3]
        behind.request("GET", path, headers={"Accept": "application/json"})
        answer = behind.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        behind.close()

    def _is_let_through(self) -> bool:
        self.proxy.requested.append(self.path)
        wanted = self.proxy.credentials
        given = self.headers.get("Proxy-Authorization")
        if wanted is not None and given != f"Basic {base64.b64encode(wanted.encode()).decode()}":
            self._refuse(407)
            return False
        if self.proxy.refuses is not None:
            self._refuse(self.proxy.refuses)
            return False
        return True

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        if status == 407:
            self.send_header("Proxy-Authenticate", 'Basic realm="test"')
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def log_message(self, *_: Any) -> None: ...


def _carry(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes in both directions until either side closes."""
    ends = {one: other, other: one}
    while True:
        ready, _, _ = select.select(list(ends), [], [], _GONE_S)
        for source in ready:
            data = source.recv(65536)
            # Data that TLS has already decrypted does not make the socket readable.
            while isinstance(source, ssl.SSLSocket) and source.pending():
                data += source.recv(65536)
            if not data:
                return
            ends[source].sendall(data)
        if not ready:
            return
