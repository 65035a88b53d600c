"""One gRPC server on one Unix socket.

gRPC removes any socket at the path that it binds. When it stops, it removes the path again, even if another process has
taken it over meanwhile. So this listener binds a hidden name in the same directory, and renames it once the server
serves. The kubelet never sees a socket that does not answer, a dead socket is replaced in one step, and only a socket
that is still ours is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import structlog

from dra_driver.errors import StateError
from dra_driver.kubelet.sockets import ensure_free, hidden_path, identity, listening
from dra_driver.kubelet.workers import Workers

_log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""The claims of the largest accepted call take half a megabyte."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_CALLS = 512
"""Calls in progress at the same time on one server; a kubelet has one for each pod that starts or ends. gRPC itself
answers any further call with RESOURCE_EXHAUSTED, which needs no thread and no queue."""
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_channelz", 0),
)
_SOCKET_MODE = 0o600
_AFTER_GRACE_S = 1.0


def unix_target(path: Path) -> str:
    """The gRPC address of a socket; gRPC decodes percent signs in it."""
    return "unix:" + quote(str(path), safe="/")


class Listener:
    """Serves the handlers at `path` from start() to stop(); used once."""

    def __init__(self, name: str, path: Path, handlers: Sequence[Any], workers: Workers) -> None:
        self.path = path
        self._name = name
        self._workers = workers
        self._server = grpc.server(
            workers, handlers=tuple(handlers), options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS
        )
        self._identity: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Binds, serves, and only then makes the socket visible.

        Raises: StateError if another process has the path or the socket cannot be made.
        """
        ensure_free(self.path)
        hidden = hidden_path(self.path)
        try:
            self._server.add_insecure_port(unix_target(hidden))
            self._server.start()
            hidden.chmod(_SOCKET_MODE)
            bound = identity(hidden)
            hidden.rename(self.path)
        except (RuntimeError, OSError) as error:
            self._server.stop(0)
            hidden.unlink(missing_ok=True)
            raise StateError(
                f"cannot listen on {self.path}: {error}; check the directory and its permissions"
            ) from error
        self._identity = bound
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
        stopped = self._server.stop(max(0.0, grace_s))
        if not stopped.wait(max(0.0, grace_s) + _AFTER_GRACE_S):
            _log.warning("calls_abandoned", server=self._name, grace_s=grace_s)
        self._workers.shutdown(wait=False)
        if self._identity is not None and identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._identity = None
