"""What all gRPC calls to the driver have in common: request IDs, logs, error texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import structlog
from structlog.contextvars import bind_contextvars, clear_contextvars

from dra_driver.errors import DraDriverError
from dra_driver.kubelet.grpc_server import Caller, Message, Method
from dra_driver.kubelet.grpc_wire import RpcError, Status

_log = structlog.get_logger(__name__)
_request_ids = itertools.count(1)

MAX_ERROR_CHARS = 1024
_MAX_LOGGED_CHARS = 4096

Unary = Callable[[Any, Caller], Message]
Streaming = Callable[[Any, Caller], Iterator[Message]]


class _Shown:
    """A message for the log; it becomes text only if the log writes the line."""

    def __init__(self, message: Any) -> None:
        self._message = message

    def __repr__(self) -> str:
        text = " ".join(str(self._message).split())
        return text if len(text) <= _MAX_LOGGED_CHARS else text[:_MAX_LOGGED_CHARS] + "…"


def error_text(error: BaseException | str) -> str:
    """One line of valid UTF-8 of limited length. The text of an unexpected error also names its class."""
    match error:
        case str():
            text = error
        case DraDriverError() | RpcError():
            text = str(error)
        case _:
            text = f"internal error: {type(error).__name__}: {error}"
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 1] + "…"


def unary(method: str, behavior: Unary) -> Unary:
    """The behavior with a request ID, logs, and a status for every exception."""

    def call(request: Any, caller: Caller) -> Message:
        clear_contextvars()  # workers are reused
        bind_contextvars(request_id=next(_request_ids), method=method)
        try:
            _log.debug("rpc_received", request=_Shown(request))
            response = behavior(request, caller)
            _log.debug("rpc_answered", response=_Shown(response))
            return response
        except RpcError as error:
            _log.error("rpc_failed", code=error.code.name, error=str(error))
            code, text = error.code, error_text(error)
        except Exception as error:  # noqa: BLE001 - the edge of the process
            _log.exception("rpc_failed", code="UNKNOWN")
            code, text = Status.UNKNOWN, error_text(error)
        finally:
            clear_contextvars()
        raise RpcError(code, text)

    return call


def streaming(method: str, behavior: Streaming) -> Streaming:
    """Like `unary`, for a call that answers with a stream."""

    def call(request: Any, caller: Caller) -> Iterator[Message]:
        clear_contextvars()
        bind_contextvars(request_id=next(_request_ids), method=method)
        try:
            _log.debug("stream_opened", request=_Shown(request))
            yield from behavior(request, caller)
            _log.debug("stream_ended")
            return
        except RpcError as error:
            _log.error("rpc_failed", code=error.code.name, error=str(error))
            code, text = error.code, error_text(error)
        except Exception as error:  # noqa: BLE001 - the edge of the process
            _log.exception("rpc_failed", code="UNKNOWN")
            code, text = Status.UNKNOWN, error_text(error)
        finally:
            clear_contextvars()
        raise RpcError(code, text)

    return call


def unary_method(name: str, behavior: Unary, request: Any) -> Method:
    """A method with one request, of this message class, and one answer."""
    return Method(unary(name, behavior), request.FromString)


def stream_method(name: str, behavior: Streaming, request: Any) -> Method:
    """A method with one request, of this message class, and a stream of answers."""
    return Method(streaming(name, behavior), request.FromString, is_stream=True)
