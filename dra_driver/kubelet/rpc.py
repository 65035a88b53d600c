"""What all gRPC calls have in common: request IDs, logs, error texts; and how this node's sockets are called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import structlog
from structlog.contextvars import bind_contextvars

from dra_driver.errors import DraDriverError
from dra_driver.model.ids import one_line

_log = structlog.get_logger(__name__)
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

    Raises: grpc.RpcError, as DEADLINE_EXCEEDED after `within_s` seconds and as UNAVAILABLE if nobody listens.
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
