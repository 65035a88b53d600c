"""The HTTP endpoint: metrics, and the probes for liveness, startup and readiness.

Limits keep one client or page from blocking the others: an idle connection is closed, a new connection above the
maximum closes the oldest, and a page that is too busy answers 503.

Readiness holds up a rolling update. So it fails only for faults that a bad release or configuration causes on every
node. Other faults are notes in the response.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO
from wsgiref.simple_server import WSGIRequestHandler

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder

from dra_driver.errors import FatalError
from dra_driver.inventory.discovery import NOT_DISCOVERED, Discovery
from dra_driver.model.dataclass import dataclass
from dra_driver.model.ids import split_address

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = structlog.get_logger(__name__)

Page = Callable[[], "Response"]

_MAX_CONNECTIONS = 64
_MAX_AT_ONE_PAGE = 16
_NO_POLL_S = 3600.0
"""`stop` wakes the thread."""


class Response(NamedTuple):
    status: int
    content_type: str
    body: bytes


def problems_page(
    problems: Callable[[], Sequence[str]], notes: Callable[[], Sequence[str]] | None = None
) -> Page:
    """Answer 200 and `ok` if there are no problems, else 503 and the problems; then the notes."""

    def page() -> Response:
        found = problems()
        noted = notes() if notes is not None else ()
        lines = [*(found or ["ok"]), *(f"note: {note}" for note in noted)]
        return Response(503 if found else 200, _TEXT, "".join(f"{line}\n" for line in lines).encode())

    return page


def json_page(document: Callable[[], bytes]) -> Page:
    return lambda: Response(200, "application/json", document())


def metrics_page(registry: CollectorRegistry) -> Page:
    encode, content_type = choose_encoder("")
    return lambda: Response(200, content_type, encode(registry))


def while_working(works: Callable[[], bool], page: Page) -> Page:
    """Answer 503 while `works` returns False: then another process knows about the node."""
    return lambda: page() if works() else _IDLE


_TEXT = "text/plain; charset=utf-8"
_NOT_FOUND = Response(404, _TEXT, b"not found\n")
_ONLY_GET = Response(405, _TEXT, b"use GET\n")
_FAILED = Response(500, _TEXT, b"internal error; see the log of gpu-dra-driver\n")
_IDLE = Response(503, _TEXT, b"another process of gpu-dra-driver works on this node\n")
_BUSY = Response(503, _TEXT, b"too many requests for this page are still in progress\n")


class HttpEndpoint:
    """`address` has the form `host:port`, `[IPv6]:port` or `:port`.

    Without a host, or with `[::]`, it serves IPv4 and IPv6. Raises: InvalidConfigError; FatalError if it cannot listen.
    """

    def __init__(self, address: str, pages: Mapping[str, Page]) -> None:
        host, port = split_address(address)
        try:
            self._server = _Server(_listen(host, port), _application(pages))
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            raise FatalError(
                f"cannot serve HTTP on {address}: {reason}; choose another --http-endpoint"
            ) from error
        serve = partial(self._server.serve_forever, poll_interval=_NO_POLL_S)
        self._thread = threading.Thread(target=serve, name="http", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.ident is not None:
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingWSGIServer):
    def __init__(self, listening: socket.socket, application: WSGIApplication) -> None:
        """`listening` must be bound: the library would query DNS for this host's name."""
        address = listening.getsockname()[:2]
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = address
        self.setup_environ()
        self.set_app(application)
        self._open: dict[Any, None] = {}  # oldest first
        self._open_lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes the socket
            self._open[request] = None
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at level debug; the library would print a traceback."""
        _log.debug("http_client_lost", client=str(client_address), exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        """Discards wsgiref's log line for each request."""

    def get_stderr(self) -> TextIO:
        """Discards wsgiref's traceback if the client has disconnected."""
        return StringIO()


def _listen(host: str, port: int) -> socket.socket:
    if host not in ("", "::"):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if host or error.errno != errno.EADDRNOTAVAIL:  # no interface has an IPv6 address
                raise
    return socket.create_server((host, port))


def _application(pages: Mapping[str, Page]) -> WSGIApplication:
    free = {path: threading.BoundedSemaphore(_MAX_AT_ONE_PAGE) for path in pages}

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            answer = _ONLY_GET
        elif path not in pages:
            answer = _NOT_FOUND
        elif not free[path].acquire(blocking=False):
            answer = _BUSY
        else:
            try:
                answer = pages[path]()
            except Exception:  # noqa: BLE001  logged; the other pages still work
                _log.exception("page_failed", path=path)
                answer = _FAILED
            finally:
                free[path].release()
        start_response(
            f"{answer.status} {HTTPStatus(answer.status).phrase}", [("Content-Type", answer.content_type)]
        )
        return [answer.body]

    return application


if TYPE_CHECKING:
    from dra_driver.kubelet.plugin import KubeletPlugin
    from dra_driver.slices.publisher import Publisher


_NOT_REGISTERED = (
    "the kubelet has not registered the plugin yet; if this lasts, check that its plugin registry directory is "
    "mounted at the same path"
)
_STOPPING = "gpu-dra-driver is stopping; another instance takes over, or the pod starts again"


class Idle(NamedTuple):
    """A fault holds up a rolling update."""

    text: str
    is_fault: bool


@dataclass(eq=False)
class Probes:
    """Results of the kubelet's probes over gRPC and HTTP: lists of sentences, empty if all is well.

    `problems` returns sentences that are only notes.
    """

    plugin: KubeletPlugin
    discovery: Discovery
    publisher: Publisher
    problems: Callable[[], Sequence[str]]
    idle: Callable[[], Idle | None] = lambda: None
    was_ready: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: list[str] | None = None

    def startup(self) -> list[str]:
        return _listed(self.plugin.liveness.start_fault())

    def liveness(self) -> list[str]:
        return _listed(self.plugin.liveness.fault())

    def readiness(self) -> list[str]:
        """Return why a rolling update must not continue."""
        idle = self.idle()
        if idle is not None:
            faults = [idle.text] if idle.is_fault else []
        else:
            faults = [*self._registration_faults(), *self._device_faults()[0], *self._slice_faults()[0]]
            self.was_ready = self.was_ready or not faults
        self._log_changes(faults)
        return faults

    def is_ready(self) -> bool:
        return not self.readiness()

    def notes(self) -> list[str]:
        failing, idle = self.readiness(), self.idle()
        if idle is not None:
            return [] if idle.is_fault else [idle.text]
        found = dict.fromkeys([*self._device_faults()[1], *self._slice_faults()[1], *self.problems()])
        return [note for note in found if note not in failing]

    def _registration_faults(self) -> list[str]:
        status = self.plugin.status
        if status is None:
            return [_NOT_REGISTERED]
        if self.plugin.stopping:
            return [_STOPPING]
        if not status.registered:
            return [f"the kubelet refused the plugin: {status.error}; see the kubelet's log for more"]
        return []

    def _device_faults(self) -> tuple[list[str], list[str]]:
        problem = self.discovery.problem()
        lines = _listed(problem)
        return (lines, []) if problem == NOT_DISCOVERED else ([], lines)

    def _slice_faults(self) -> tuple[list[str], list[str]]:
        problem = self.publisher.problem
        lines = _listed(problem and f"slices: {problem}")
        if self.discovery.problem() not in (None, NOT_DISCOVERED):
            return [], lines
        return ([], lines) if self.publisher.wait_published(0.0) else (lines, [])

    def _log_changes(self, faults: list[str]) -> None:
        with self._lock:
            before, self._logged = self._logged, faults
        if faults and faults != before:
            _log.info("not_ready", reasons=faults)
        elif not faults and before != []:
            _log.info("ready")


def _listed(fault: str | None) -> list[str]:
    return [] if fault is None else [fault]
