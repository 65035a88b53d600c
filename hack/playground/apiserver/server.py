"""The playground's API server: start, stop, restart on the same port, kubeconfig, and records of requests."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import random
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.kube.endpoint import SERVICE_ACCOUNT_VARIABLE
from playground.apiserver.faults import Faults
from playground.apiserver.handler import Handler
from playground.apiserver.operations import Operations
from playground.apiserver.resources import BY_PLURAL, RESOURCE_VERSIONS, Resource
from playground.apiserver.rest import Rest
from playground.apiserver.rules import default_gates
from playground.apiserver.store import Store, copy_json

__all__ = ["PlaygroundApiServer", "RecordedRequest", "self_signed"]

_random = random.SystemRandom()  # with the common generator, tests that seed it would choose the same port
_LASTING_PORTS = (20000, 30000)  # below the kernel's range of ports for outgoing connections
_TLS_HANDSHAKE = b"\x16"
_SO_ATTACH_FILTER = 26  # in Linux; not defined in Python's socket module
_WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as it arrived. `status` is 0 if the connection was dropped."""

    method: str
    path: str
    query: Mapping[str, str]
    user_agent: str
    status: int


class PlaygroundApiServer:
    """An API server on loopback. Use it as a context manager, or with `start()` and `stop()`.

    After `stop()`, another `start()` uses the same port and has the same objects. `tokens` are the accepted bearer
    tokens; None accepts all requests. `minor` is the minor version of Kubernetes, at least 34; `gates` override its
    default feature gates. `tls` is (certificate file, key file); with it, the port serves both plain HTTP and TLS.
    """

    def __init__(
        self,
        *,
        served: tuple[str, ...] = RESOURCE_VERSIONS,
        minor: int = 37,
        gates: Mapping[str, bool] | None = None,
        tokens: Collection[str] | None = None,
        history: int = 1000,
        bookmark_s: float = 60.0,
        port: int = 0,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.served = served
        self.tokens = tokens
        self.bookmark_s = bookmark_s
        self.gates = {**default_gates(minor), **(gates or {})}
        self.store = Store(history)
        self.faults = Faults(self.store.wake)
        self.requests: list[RecordedRequest] = []
        self.operations = Operations(self.store, self.gates, minor)
        self.rest = Rest(self.operations)
        self._port = port
        self._scheme = "https" if tls else "http"
        self._tls = tls
        self._stopping = threading.Event()
        self._http: _Http | None = None
        self._thread: threading.Thread | None = None
        for name in ("default", "kube-system"):
            self.add("namespaces", {"metadata": {"name": name}})

    def __enter__(self) -> PlaygroundApiServer:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The TCP port; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        """The URL for `server:` of a kubeconfig."""
        return f"{self._scheme}://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen and serve. Raises: OSError if the port is taken."""
        self._stopping.clear()
        handler = type("BoundHandler", (Handler,), {"api": self})
        self._http = _Http(("127.0.0.1", self._port), handler) if self._port else _on_a_lasting_port(handler)
        self._http.tls = _tls_context(self._tls)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.accept_loop, name="playground-apiserver", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Refuse new connections and break open ones. Safe to call twice."""
        self._stopping.set()
        self.store.wake()
        if self._http is not None and self._thread is not None:
            self._http.close_all()
            self._thread.join()
            self._http = None

    def vanish(self) -> None:
        """Drop every packet on the currently open connections; new connections work. Needs root.

        This simulates a server that loses its network while another server takes over its address.
        """
        assert self._http is not None
        self._http.drop_packets()

    def is_running(self) -> bool:
        """Whether the server serves; False as soon as `stop` begins."""
        return not self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Delay a response; `stop` ends the delay."""
        if seconds:
            self._stopping.wait(seconds)

    def record(self, method: str, path: str, query: Mapping[str, str], agent: str, status: int) -> None:
        """Add a request to `requests`."""
        self.requests.append(RecordedRequest(method, path, dict(query), agent, status))

    def writes(self, path: str = "") -> list[RecordedRequest]:
        """Return the recorded writes whose path contains `path`, without dry runs."""
        made = [r for r in list(self.requests) if r.method in _WRITES and "dryRun" not in r.query]
        return [r for r in made if path in r.path]

    def add(self, plural: str, obj: dict[str, Any], *, group: str = "") -> dict[str, Any]:
        """Create an object without a request, with its status if it has one, and return a copy. Raises: ApiFailure."""
        resource = BY_PLURAL[group, plural]
        body = {"apiVersion": f"{group}/v1" if group else "v1", "kind": resource.kind} | copy_json(obj)
        metadata = body["metadata"]
        stored = self.operations.create(resource, metadata.get("namespace"), body)
        if resource.has_status and obj.get("status"):
            key = (metadata.get("namespace", ""), metadata["name"])
            status = {"metadata": {"name": key[1]}, "status": copy_json(obj["status"])}
            stored = self.operations.update(resource, key, status, status=True)
        return copy_json(stored)

    def objects(self, plural: str, *, group: str = "resource.k8s.io") -> list[dict[str, Any]]:
        """Return copies of all objects of a resource in version v1, in the order of namespace and name."""
        items, _ = self.store.select(BY_PLURAL[group, plural], lambda _obj: True)
        return copy_json(items)

    def resource(self, plural: str, *, group: str = "resource.k8s.io") -> Resource:
        """Return the description of a resource. Raises: KeyError."""
        return BY_PLURAL[group, plural]

    def write_kubeconfig(self, path: Path, *, token: str | None = None) -> None:
        """Write a kubeconfig for this server, for kubectl and the driver. It is JSON, which is valid YAML."""
        cluster = {"server": self.url} | ({"certificate-authority": str(self._tls[0])} if self._tls else {})
        user = {"token": token} if token else {}
        name, context = "playground", {"cluster": "playground", "user": "playground"}
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": name,
            "clusters": [{"name": name, "cluster": cluster}], "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": context}],
        }  # fmt: skip
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        path.chmod(0o600)

    def write_service_account(self, directory: Path, *, token: str = "of-the-pod") -> dict[str, str]:
        """Write a service account's files, as the kubelet mounts them into a pod. Return the environment variables by
        which a daemon finds them and this server, which must have been started. Raises: InvalidConfigError without the
        program openssl.
        """
        directory.mkdir(exist_ok=True)
        if self._tls is None:
            self._tls = self_signed(directory / "server")
            if self._http is not None:
                self._http.tls = _tls_context(self._tls)
        content = {"ca.crt": self._tls[0].read_text(), "namespace": "default", "token": token}
        for name, text in content.items():
            (directory / name).write_text(text)
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._port),
            SERVICE_ACCOUNT_VARIABLE: str(directory),
        }


def self_signed(stem: Path, *, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Create a self-signed certificate for these names, and its key, as the files `stem`.crt and `stem`.key.

    Raises: InvalidConfigError without the program openssl.
    """
    cert, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
    ]  # fmt: skip
    command += ["-days", "30", "-subj", f"/CN={stem.name}", "-addext", f"subjectAltName={names}"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError as error:
        raise InvalidConfigError(
            "the program openssl, which creates certificates, is missing; install it"
        ) from error
    return cert, key


class _Http(ThreadingHTTPServer):
    """An HTTP server that knows its open connections, so that a stop breaks them, like the crash of a server."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        super().__init__(address, handler)
        self.tls: ssl.SSLContext | None = None
        self._open: set[socket.socket] = set()
        self._closing = False
        self._open_lock = threading.Lock()

    def accept_loop(self) -> None:
        """Serve until `close_all`. Unlike `serve_forever`, this does not poll."""
        while True:
            try:
                connection, address = self.socket.accept()
            except OSError:
                break
            with self._open_lock:
                self._open.add(connection)
                if self._closing:
                    _shut(connection)
            self.process_request(connection, address)
        self.server_close()

    def close_all(self) -> None:
        """End the accept loop, and break every connection."""
        _shut(self.socket)
        with self._open_lock:
            self._closing = True
            for connection in self._open:
                _shut(connection)

    def drop_packets(self) -> None:
        """Drop arriving packets of all open connections, so that they are neither acknowledged nor answered."""
        nothing = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes
        program = struct.pack("@HP", 1, ctypes.addressof(nothing))
        with self._open_lock:
            for connection in self._open:
                socket.socket.setsockopt(connection, socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Wrap the connection in TLS, in its own thread, so that a slow handshake does not delay other connections."""
        if self.tls is None or request.recv(1, socket.MSG_PEEK) != _TLS_HANDSHAKE:
            super().finish_request(request, client_address)
            return
        with contextlib.suppress(ssl.SSLError), self.tls.wrap_socket(request, server_side=True) as wrapped:
            with self._open_lock:
                self._open.add(wrapped)  # the plain socket no longer has the descriptor
            try:
                super().finish_request(wrapped, client_address)
            finally:
                with self._open_lock:
                    self._open.discard(wrapped)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection, then close it."""
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Bind without the reverse lookup of the host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of clients that have disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _on_a_lasting_port(handler: Any) -> _Http:
    """Return a server on a port that outgoing connections do not use, so that it is still free after a stop."""
    while True:
        try:
            return _Http(("127.0.0.1", _random.randrange(*_LASTING_PORTS)), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not through TLS, whose reader may be busy


def _tls_context(files: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context
