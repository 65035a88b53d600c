"""One gRPC call to a socket of this node, for whoever looks whether it answers."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from h2 import events
from h2.exceptions import ProtocolError

from dra_driver.kubelet.grpc_wire import CONTENT_TYPE, RpcError, Status, framed, http2, status_of, unframed

_READ_BYTES = 65536
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_Answer = TypeVar("_Answer")


def call(path: Path, method: str, request: Any, answer: type[_Answer], within_s: float) -> _Answer:
    """The answer of `method`, such as `/pluginregistration.Registration/GetInfo`, over a connection of its own.

    Raises: RpcError, as DEADLINE_EXCEEDED after `within_s` seconds and as UNAVAILABLE if nobody listens.
    """
    until = time.monotonic() + within_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(max(0.001, within_s))
            connection.connect(str(path))
            content = exchange(connection, method, request.SerializeToString(), until)
        except TimeoutError as error:
            raise RpcError(Status.DEADLINE_EXCEEDED, f"no answer within {within_s:.1f} s") from error
        except OSError as error:
            raise RpcError(Status.UNAVAILABLE, error.strerror or str(error)) from error
        except ProtocolError as error:
            raise RpcError(Status.UNAVAILABLE, f"the answer is not HTTP/2: {error}") from error
    try:
        return answer.FromString(content)  # type: ignore[attr-defined,no-any-return]
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, f"the answer cannot be read: {error}") from error


def exchange(connection: socket.socket, method: str, message: bytes, until: float) -> bytes:
    """The message that answers `message`. Raises: RpcError; OSError; ProtocolError."""
    mine = http2(is_client=True, max_calls=1)
    mine.initiate_connection()
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", CONTENT_TYPE),
        ("grpc-timeout", f"{max(1, int((until - time.monotonic()) * 1000))}m"),
    ]
    mine.send_headers(1, headers)
    mine.send_data(1, framed(message), end_stream=True)
    body = bytearray()
    ended: tuple[Status, str] | None = None
    while ended is None:
        connection.sendall(mine.data_to_send())
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(_READ_BYTES)
        if not data:
            raise RpcError(Status.UNAVAILABLE, "the connection was closed")
        for event in mine.receive_data(data):
            match event:
                case events.ResponseReceived() | events.TrailersReceived():
                    ended = status_of(event.headers) or ended
                case events.DataReceived():
                    mine.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                    body += event.data
                case events.StreamReset() | events.ConnectionTerminated():
                    ended = ended or (Status.UNAVAILABLE, "the call was cut off")
                case events.StreamEnded():
                    ended = ended or (Status.UNKNOWN, "the answer has no status")
        if len(body) > _MAX_ANSWER_BYTES:
            raise RpcError(Status.RESOURCE_EXHAUSTED, "the answer is too large")
    code, text = ended
    if code is not Status.OK:
        raise RpcError(code, text)
    return unframed(body)
