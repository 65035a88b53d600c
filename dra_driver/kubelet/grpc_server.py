"""gRPC with limits: servers on TCP and on Unix sockets, what all calls have in common (request IDs, logs, error texts),
and calls to the sockets of this node.

gRPC removes any socket at the path that it binds. When it stops, it removes the path again, even if another process has
taken it over. So a socket is bound under a hidden name in the same directory, and renamed once the server serves. The
kubelet never sees a socket that does not answer, a dead socket is replaced in one step, and only a socket that is still
ours is removed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import structlog
from structlog.contextvars import bind_contextvars

from dra_driver.errors import DraDriverError, StateError
from dra_driver.kubelet.sockets import ensure_free, hidden_path, identity
from dra_driver.model.ids import one_line

_request_ids = itertools.count(1)
_bytes_of = methodcaller("SerializeToString")

MAX_ERROR_BYTES = 1024
_CLIENT_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.enable_retries", 0),
)

Methods = dict[str, grpc.RpcMethodHandler]
"""What answers calls, by their paths, such as `/pluginregistration.Registration/GetInfo`."""
_Behavior = Callable[[Any, grpc.ServicerContext], Any]
_log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""The claims of the largest accepted call take half a megabyte."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_CALLS = 512
"""Calls in progress at the same time on one server; a kubelet has one for each pod that starts or ends, and one for
health. gRPC answers any further call with RESOURCE_EXHAUSTED."""
_SOCKET_MODE = 0o600
_AFTER_GRACE_S = 1.0


class RpcError(Exception):
    """Ends a call with this status; the client gets the text as it is."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def error_text(error: BaseException | str) -> str:
    """One line of valid UTF-8 of limited length. The text of an unexpected error also names its class."""
    match error:
        case str():
            text = error
        case DraDriverError() | RpcError():
            text = str(error)
        case _:
            text = f"internal error: {type(error).__name__}: {error}"
    return one_line(text, MAX_ERROR_BYTES)


def unary(method: str, behavior: _Behavior, request: Any) -> grpc.RpcMethodHandler:
    """The handler of a method with one request, of this message class, and one answer."""

    def call(message: Any, context: grpc.ServicerContext) -> Any:
        with _errors_told(method, context):
            _log.debug("rpc_received", request=message)
            response = behavior(message, context)
            _log.debug("rpc_answered", response=response)
        return response

    return grpc.unary_unary_rpc_method_handler(call, request.FromString, _bytes_of)


def streaming(method: str, behavior: _Behavior, request: Any) -> grpc.RpcMethodHandler:
    """The handler of a method with one request, of this message class, and a stream of answers."""

    def call(message: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _errors_told(method, context):
            _log.debug("stream_opened", request=message)
            yield from behavior(message, context)
            _log.debug("stream_ended")

    return grpc.unary_stream_rpc_method_handler(call, request.FromString, _bytes_of)


@contextmanager
def _errors_told(method: str, context: grpc.ServicerContext) -> Iterator[None]:
    """Gives a call its request ID, and makes a log event and a status of what it raises."""
    # gRPC runs each call in a context of its own.
    bind_contextvars(request_id=next(_request_ids), method=method)
    try:
        yield
        return
    except RpcError as error:
        _log.error("rpc_failed", code=error.code.name, error=str(error))
        code, text = error.code, error_text(error)
    except Exception as error:  # noqa: BLE001 - the edge of the process
        _log.exception("rpc_failed", code="UNKNOWN")
        code, text = grpc.StatusCode.UNKNOWN, error_text(error)
    context.abort(code, text)


def unix_target(path: Path) -> str:
    """The gRPC address of a socket; gRPC decodes percent signs in it."""
    return "unix:" + quote(str(path), safe="/")


def ask(path: Path, method: str, request: Any, answer: Any, within_s: float) -> Any:
    """What `method` of the socket returns, a message of the class `answer`, over a connection of its own.

    Raises: grpc.RpcError, as DEADLINE_EXCEEDED after `within_s` seconds and as UNAVAILABLE if no one listens.
    """
    return ask_with_metadata(path, method, request, answer, within_s)[0]


def ask_with_metadata(
    path: Path, method: str, request: Any, answer: Any, within_s: float
) -> tuple[Any, dict[str, str]]:
    """As `ask`, and the metadata that the server sent after its answer."""
    with grpc.insecure_channel(unix_target(path), options=_CLIENT_OPTIONS) as channel:
        method_of = channel.unary_unary(method, _bytes_of, answer.FromString)
        response, call = method_of.with_call(request, timeout=max(0.0, within_s))
        return response, dict(call.trailing_metadata() or ())


class _CallThreads(Executor):
    """A thread for each call, so that no call waits for another one, and no thread is left at rest.

    The threads are daemons: a handler that hangs in the NVIDIA driver does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                fn(*args, **kwargs)
            finally:
                self._running.discard(thread)
                future.set_result(None)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._running.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            # Raised, it would end gRPC's own thread. The caller waits until its deadline.
            self._running.discard(thread)
            _log.exception("worker_not_started", pool=self._name, threads=len(self._running))
            future.set_exception(error)
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether all calls end in time, those whose callers have left too."""
        until = time.monotonic() + timeout_s
        for thread in tuple(self._running):
            thread.join(max(0.0, until - time.monotonic()))
        return not self._running


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(handler_call_details.method)


class GrpcServer:
    """Serves the methods from start() to stop(); used once. `options` are gRPC's own."""

    def __init__(
        self,
        name: str,
        methods: Methods,
        *,
        calls: int,
        request_bytes: int,
        options: Iterable[tuple[str, int]] = (),
    ) -> None:
        self._name = name
        self._threads = _CallThreads(name)
        self._server = grpc.server(
            self._threads,
            [_Handler(methods)],
            options=(
                ("grpc.max_receive_message_length", request_bytes),
                ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
                ("grpc.max_concurrent_streams", calls),
                ("grpc.compression_enabled_algorithms_bitset", 1),  # none
                ("grpc.so_reuseport", 0),
                *options,
            ),
            maximum_concurrent_rpcs=calls,
        )

    def bind(self, address: str) -> int:
        """Bind an address before start(); the port of a TCP address. Raises: RuntimeError."""
        port: int = self._server.add_insecure_port(address)
        return port

    def start(self) -> None:
        """Take calls."""
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` seconds, then leaves their callers without an answer.
        Harmless before start."""
        stopped = self._server.stop(max(0.0, grace_s)).wait(max(0.0, grace_s) + _AFTER_GRACE_S)
        if not (stopped and self._threads.wait_idle(_AFTER_GRACE_S)):
            _log.warning("calls_abandoned", server=self._name, grace_s=grace_s)


class SocketServer:
    """Serves the methods at `path` from start() to stop(); used once."""

    def __init__(self, name: str, path: Path, methods: Methods) -> None:
        self.path = path
        self._name = name
        self._server = GrpcServer(name, methods, calls=MAX_CALLS, request_bytes=MAX_REQUEST_BYTES)
        self._identity: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Binds, serves, and only then makes the socket visible.

        Raises: StateError if another process has the path or the socket cannot be made.
        """
        ensure_free(self.path)
        hidden = hidden_path(self.path)
        try:
            self._server.bind(unix_target(hidden))
            hidden.chmod(_SOCKET_MODE)
            self._server.start()
            bound = identity(hidden)
            hidden.rename(self.path)
        except (RuntimeError, OSError) as error:
            self._server.stop(0)
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else "gRPC cannot bind it"
            raise StateError(
                f"cannot listen on {self.path}: {reason}; check the directory and its permissions"
            ) from error
        self._identity = bound
        _log.info("socket_served", server=self._name, path=str(self.path))

    def fault(self) -> str | None:
        """Why the kubelet cannot find our socket any more; None while it can."""
        found = identity(self.path)
        if found is None:
            return f"the {self._name} socket {self.path} was removed"
        if found != self._identity:
            return f"the {self._name} socket {self.path} was taken over by another process"
        return None

    def stop(self, grace_s: float) -> None:
        """As of GrpcServer; removes the socket."""
        self._server.stop(grace_s)
        if self._identity is not None and identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._identity = None
