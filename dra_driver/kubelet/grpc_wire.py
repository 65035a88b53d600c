"""gRPC on HTTP/2: what a message, a status and a deadline look like on the wire.

The HTTP/2 itself, its frames, windows and compressed headers, is the library h2's.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote, unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hpack import NeverIndexedHeaderTuple

PREFIX_BYTES = 5
CONTENT_TYPE = "application/grpc"
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_LONGEST_S = 1e9
_NOT_ESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_MAX_HEADER_BYTES = 16384
_CLOSED_STREAMS_KNOWN = 128

Headers = Sequence[tuple[str, str] | NeverIndexedHeaderTuple]


class Status(enum.IntEnum):
    """How a call ended, with gRPC's numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """Ends a call with this status; the client gets the text as it is."""

    def __init__(self, code: Status, message: str) -> None:
        super().__init__(message)
        self.code = code


def framed(message: bytes) -> bytes:
    """A message, not compressed, as it stands in the body."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def unframed(body: bytes | bytearray) -> bytes:
    """The one message of a body. Raises: RpcError."""
    if len(body) < PREFIX_BYTES:
        raise RpcError(Status.INTERNAL, "the call has no message")
    if body[0]:
        raise RpcError(Status.UNIMPLEMENTED, "compressed messages are not understood")
    if int.from_bytes(body[1:PREFIX_BYTES], "big") != len(body) - PREFIX_BYTES:
        raise RpcError(Status.INTERNAL, "the call has not exactly one whole message")
    return bytes(body[PREFIX_BYTES:])


def timeout_s(text: str | None) -> float | None:
    """Seconds of a `grpc-timeout`; None without one, or with one of decades. Raises: RpcError."""
    if text is None:
        return None
    match = _TIMEOUT.fullmatch(text)
    if match is None:
        raise RpcError(Status.INTERNAL, f"grpc-timeout {text[:32]!r} is not valid")
    seconds = int(match[1]) * _UNITS[match[2]]
    return seconds if seconds <= _LONGEST_S else None


def trailers(code: Status, message: str = "") -> Headers:
    """The headers that end an answer."""
    status = ("grpc-status", str(int(code)))
    if not message:
        return [status]
    # A caller may ask for a table of any size, so texts that are seldom the same twice stay out of it.
    return [status, NeverIndexedHeaderTuple("grpc-message", quote(message, safe=_NOT_ESCAPED))]


def status_of(headers: Iterable[Any]) -> tuple[Status, str] | None:
    """Status and text of an answer's headers, pairs of texts; None if these do not end it."""
    found: dict[str, str] = dict(headers)
    number = found.get("grpc-status")
    if number is None:
        return None
    try:
        code = Status(int(number))
    except ValueError:
        code = Status.UNKNOWN
    return code, unquote(found.get("grpc-message", ""))


class _Connection(H2Connection):
    # A kubelet has one connection for weeks, and h2 remembers how each of its last streams ended.
    MAX_CLOSED_STREAMS = _CLOSED_STREAMS_KNOWN
    DEFAULT_MAX_HEADER_LIST_SIZE = _MAX_HEADER_BYTES


def http2(*, is_client: bool, max_calls: int) -> H2Connection:
    """One end of a connection; `max_calls` is how many calls the other end may have under way."""
    # Our own headers are few and always the same, so nobody checks them.
    config = H2Configuration(
        client_side=is_client,
        header_encoding="latin-1",  # no byte that somebody sends is an error
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    connection = _Connection(config)
    connection.local_settings = Settings(
        client=is_client,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: max_calls,
            SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
        },
    )
    return connection
