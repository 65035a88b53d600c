"""Connections whose answers end by a deadline. urllib3's read timeout counts anew with each byte that arrives, so a
server that drips could hold a caller up for ever."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPResponse
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

_limits: ContextVar[tuple[float | None, float | None]] = ContextVar("answer_limits", default=(None, None))


@contextmanager
def answered_by(deadline: float | None, idle_s: float | None) -> Iterator[None]:
    """An answer that begins to be read inside has to be complete by `deadline` (time.monotonic()). With None it may
    take any time, as long as no pause in its body is longer than `idle_s`."""
    token = _limits.set((deadline, idle_s))
    try:
        yield
    finally:
        _limits.reset(token)


def time_answers(manager: urllib3.PoolManager) -> urllib3.PoolManager:
    """Have the connections of a new manager keep to `answered_by`."""
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return manager


class _TimedReader(io.RawIOBase):
    """The bytes of a socket until the deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer was not complete in time")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedSocket:
    """As much of a socket as an HTTPResponse wants."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))


class _TimedResponse(HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
        deadline, self._idle_s = _limits.get()
        self._sock = sock
        timed: Any = sock if deadline is None else _TimedSocket(sock, deadline)
        super().__init__(timed, *args, **options)

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        if self._idle_s is not None:
            self._sock.settimeout(self._idle_s)


class _HttpConnection(HTTPConnection):
    response_class = _TimedResponse


class _HttpsConnection(HTTPSConnection):
    response_class = _TimedResponse


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection
