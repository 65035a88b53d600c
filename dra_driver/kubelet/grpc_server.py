"""gRPC servers with limits, on TCP and Unix sockets, and client calls to the sockets of this node.

gRPC removes any socket at the path that it binds, and again when it stops, even if another process has replaced the
socket. So a server binds a hidden name in the same directory, and renames the socket when the server responds. It
removes only its own socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import structlog
from structlog.contextvars import bind_contextvars

from dra_driver.base.threads import start_thread
from dra_driver.errors import DraDriverError, StateError
from dra_driver.kubelet.sockets import ensure_free, hidden_path, identity
from dra_driver.model.ids import one_line

_request_ids = itertools.count(1)
_bytes_of = methodcaller("SerializeToString")

MAX_ERROR_BYTES = 1024
_CLIENT_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a separate connection for each channel
    ("grpc.enable_retries", 0),
)

Methods = dict[str, grpc.RpcMethodHandler]
"""Handlers by path, such as `/pluginregistration.Registration/GetInfo`."""
_Behavior = Callable[[Any, grpc.ServicerContext], Any]
_log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Eight times the size of the largest request that we accept."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_CALLS = 512
"""Concurrent calls; gRPC rejects more with RESOURCE_EXHAUSTED. A kubelet has one for each pod that starts or stops."""
_SOCKET_MODE = 0o600
_AFTER_GRACE_S = 1.0


class RpcError(Exception):
    """Ends a call with this status; the client receives the text unchanged."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def error_text(error: BaseException | str) -> str:
    """Return one line of valid UTF-8 of limited length."""
    match error:
        case str():
            text = error
        case DraDriverError() | RpcError():
            text = str(error)
        case _:
            text = f"internal error: {type(error).__name__}: {error}"
    return one_line(text, MAX_ERROR_BYTES)


def unary(method: str, behavior: _Behavior, request: Any) -> grpc.RpcMethodHandler:
    def call(message: Any, context: grpc.ServicerContext) -> Any:
        with _errors_reported(method, context):
            _log.debug("rpc_received", request=message)
            response = behavior(message, context)
            _log.debug("rpc_answered", response=response)
        return response

    return grpc.unary_unary_rpc_method_handler(call, request.FromString, _bytes_of)


def streaming(method: str, behavior: _Behavior, request: Any) -> grpc.RpcMethodHandler:
    def call(message: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _errors_reported(method, context):
            _log.debug("stream_opened", request=message)
            yield from behavior(message, context)
            _log.debug("stream_ended")

    return grpc.unary_stream_rpc_method_handler(call, request.FromString, _bytes_of)


@contextmanager
def _errors_reported(method: str, context: grpc.ServicerContext) -> Iterator[None]:
    # gRPC runs each call in its own context.
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
    return "unix:" + quote(str(path), safe="/")


def call_method(path: Path, method: str, request: Any, response_type: Any, timeout_s: float) -> Any:
    """Return the response of `method` on the socket.

    Raises: grpc.RpcError, with DEADLINE_EXCEEDED after `timeout_s`, and with UNAVAILABLE if no process listens.
    """
    return call_with_metadata(path, method, request, response_type, timeout_s)[0]


def call_with_metadata(
    path: Path, method: str, request: Any, response_type: Any, timeout_s: float
) -> tuple[Any, dict[str, str]]:
    """Return the response, like `call_method`, and the trailing metadata."""
    with grpc.insecure_channel(unix_target(path), options=_CLIENT_OPTIONS) as channel:
        method_of = channel.unary_unary(method, _bytes_of, response_type.FromString)
        response, call = method_of.with_call(request, timeout=max(0.0, timeout_s))
        return response, dict(call.trailing_metadata() or ())


class _CallThreads(Executor):
    """Runs each call in a daemon thread: no call waits for another one, and a hanging call does not keep the process
    alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                fn(*args, **kwargs)
            finally:
                self._running.discard(future)
                future.set_result(None)

        self._running.add(future)
        try:
            start_thread(self._name, run)
        except RuntimeError as error:
            # If raised, this would end gRPC's own thread. The caller waits until its deadline.
            self._running.discard(future)
            _log.exception("worker_not_started", pool=self._name, threads=len(self._running))
            future.set_exception(error)
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Return whether all calls have ended in time, including calls whose callers have left."""
        return not wait(tuple(self._running), timeout_s).not_done


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(handler_call_details.method)


class GrpcServer:
    """Serves the methods from start() to stop(); cannot be restarted."""

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
                ("grpc.compression_enabled_algorithms_bitset", 1),  # disables compression
                ("grpc.so_reuseport", 0),
                *options,
            ),
            maximum_concurrent_rpcs=calls,
        )

    def bind(self, address: str) -> int:
        """Bind an address before start(), and return the port of a TCP address. Raises: RuntimeError."""
        port: int = self._server.add_insecure_port(address)
        return port

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Reject new calls, and abandon running ones after `grace_s` seconds. Does nothing before start()."""
        stopped = self._server.stop(max(0.0, grace_s)).wait(max(0.0, grace_s) + _AFTER_GRACE_S)
        if not (stopped and self._threads.wait_idle(_AFTER_GRACE_S)):
            _log.warning("calls_abandoned", server=self._name, grace_s=grace_s)


class SocketServer:
    """Serves the methods at each of the `paths`: one server needs half the threads and wake-ups of two."""

    def __init__(self, paths: Mapping[str, Path], methods: Methods) -> None:
        self._paths = paths
        self._server = GrpcServer(
            next(iter(paths)), methods, calls=MAX_CALLS, request_bytes=MAX_REQUEST_BYTES
        )
        self._identities: dict[Path, tuple[int, int, int] | None] = {}

    def start(self) -> None:
        """Start the server, and only then make the sockets visible, in their order. Raises: StateError."""
        for path in self._paths.values():
            ensure_free(path)
        try:
            for path in self._paths.values():
                self._server.bind(unix_target(hidden_path(path)))
                hidden_path(path).chmod(_SOCKET_MODE)
            self._server.start()
            for name, path in self._paths.items():
                bound = identity(hidden_path(path))
                hidden_path(path).rename(path)
                self._identities[path] = bound
                _log.info("socket_served", server=name, path=str(path))
        except (RuntimeError, OSError) as error:
            self.stop(0)
            for left in self._paths.values():
                with suppress(OSError):
                    hidden_path(left).unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else "gRPC cannot bind it"
            raise StateError(
                f"cannot listen on {path}: {reason}; check the directory and its permissions"
            ) from error

    def fault(self) -> str | None:
        """Return why the kubelet can no longer find our sockets."""
        for name, path in self._paths.items():
            found = identity(path)
            if found is None:
                return f"the {name} socket {path} was removed"
            if found != self._identities.get(path):
                return f"the {name} socket {path} was taken over by another process"
        return None

    def stop(self, grace_s: float) -> None:
        self._server.stop(grace_s)
        for path, bound in self._identities.items():
            if bound is not None and identity(path) == bound:
                path.unlink(missing_ok=True)
        self._identities = {}
