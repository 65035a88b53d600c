"""One gRPC server on one Unix socket.

A listener binds a hidden name in the same directory, and renames it once the server serves. The kubelet never sees a
socket that does not answer, a dead socket is replaced in one step, and only a socket that is still ours is removed.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.errors import StateError
from dra_driver.kubelet.grpc_server import GrpcServer, Limits, Method
from dra_driver.kubelet.sockets import ensure_free, hidden_path, identity, listening
from dra_driver.kubelet.workers import Workers

_log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""The claims of the largest accepted call take half a megabyte."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_CALLS = 512
"""Calls in progress at the same time on one server; a kubelet has one for each pod that starts or ends."""
_MAX_CONNECTIONS = 128
_SOCKET_MODE = 0o600


class Listener:
    """Serves the methods at `path` from start() to stop(); used once."""

    def __init__(self, name: str, path: Path, methods: Mapping[str, Method], workers: Workers) -> None:
        self.path = path
        self._name = name
        limits = Limits(_MAX_CONNECTIONS, MAX_CALLS, MAX_REQUEST_BYTES, MAX_ANSWER_BYTES)
        self._server = GrpcServer(methods, workers, limits)
        self._identity: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Binds, serves, and only then makes the socket visible.

        Raises: StateError if another process has the path or the socket cannot be made.
        """
        ensure_free(self.path)
        hidden = hidden_path(self.path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            hidden.unlink(missing_ok=True)
            bound.bind(str(hidden))
            hidden.chmod(_SOCKET_MODE)
            self._server.start(bound)
            found = identity(hidden)
            hidden.rename(self.path)
        except OSError as error:
            self._server.stop(0)
            bound.close()
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise StateError(
                f"cannot listen on {self.path}: {error.strerror or error}; check the directory and its permissions"
            ) from error
        self._identity = found
        _log.info("socket_served", server=self._name, path=str(self.path))

    def fault(self, *, connect: bool) -> str | None:
        """Why the kubelet cannot reach us any more; None while it can. With `connect` it also dials the socket."""
        found = identity(self.path)
        if found is None:
            return f"the {self._name} socket {self.path} was removed"
        if found != self._identity:
            return f"the {self._name} socket {self.path} was taken over by another process"
        if connect and not listening(self.path):
            return f"the {self._name} gRPC server stopped serving {self.path}"
        return None

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` seconds, then cancels them; removes the socket."""
        if not self._server.stop(max(0.0, grace_s)):
            _log.warning("calls_abandoned", server=self._name, grace_s=grace_s)
        if self._identity is not None and identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._identity = None
