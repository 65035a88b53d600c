"""Serves the supervisor on a Unix socket: root only, one thread a connection, small messages."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.errors import DraDriverError, RetryableError, StateError
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.mps import protocol
from dra_driver.mps.connection import peer_uid, read_line, short_path
from dra_driver.mps.supervisor import Supervisor

_log = structlog.get_logger(__name__)

_MOST_CONNECTIONS = 128
_IDLE_S = 30.0
_LINGER_S = 0.2
_CLOSE_S = 5.0
_ACCEPT_AGAIN_S = 0.5


class Server:
    """Listens from `start` to `stop`. The socket appears under its name only when it answers."""

    def __init__(self, path: Path, supervisor: Supervisor) -> None:
        self._path = path
        self._supervisor = supervisor
        self._socket: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._guard = threading.Lock()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Raises: StateError."""
        hidden = self._path.with_name(f".{self._path.name}.new")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            hidden.unlink(missing_ok=True)
            with short_path(hidden) as address:
                listener.bind(address)
            hidden.chmod(0o600)
            listener.listen(_MOST_CONNECTIONS)
            hidden.replace(self._path)
        except OSError as error:
            listener.close()
            raise StateError(f"cannot listen on {self._path}: {error.strerror or error}") from error
        self._socket = listener
        acceptor = threading.Thread(target=self._accept, args=(listener,), name="mps-accept")
        acceptor.start()
        self._acceptor = acceptor

    def stop(self) -> None:
        """Take no more requests, give those in progress some seconds, remove the socket."""
        self._stopping.set()
        with suppress(OSError):
            self._path.unlink()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self._acceptor is not None:
            self._acceptor.join()
        with self._guard:
            left = list(self._connections.items())
        for connection, thread in left:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            thread.join(_CLOSE_S)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                # Out of file descriptors, for one: who asks meanwhile waits in the listener's queue.
                if not self._stopping.wait(_ACCEPT_AGAIN_S):
                    _log.warning("mps_connection_refused", reason=str(error))
                continue
            if not _may_ask(connection) or len(self._connections) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="mps-connection", daemon=True)
        with self._guard:
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:  # out of threads
            with self._guard:
                del self._connections[connection]
            connection.close()
            _log.warning("mps_connection_refused", reason=str(error))

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_IDLE_S)
            buffer = bytearray()
            while not self._stopping.is_set():
                line = read_line(connection, buffer)
                if line is None:
                    return
                connection.sendall(self._answer(line))
        except protocol.ProtocolError as error:
            self._refuse(connection, error)
        except OSError:
            pass  # the client went away or was silent for too long
        finally:
            with self._guard:
                self._connections.pop(connection, None)
            connection.close()

    def _refuse(self, connection: socket.socket, error: protocol.ProtocolError) -> None:
        """Answer what could not be read; what is still on its way is taken in, or the answer would be lost."""
        with suppress(OSError):
            connection.sendall(protocol.encode_error(error))
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_LINGER_S)
            while connection.recv(65536):
                pass

    def _answer(self, line: bytes) -> bytes:
        try:
            return protocol.encode_reply(self._handle(protocol.decode_request(line)))
        except DraDriverError as error:
            return protocol.encode_error(error)
        except Exception as error:  # noqa: BLE001  one request must not end the host
            _log.exception("mps_request_failed")
            return protocol.encode_error(RetryableError(f"internal error of the MPS host: {error!r}"))

    def _handle(self, request: protocol.Request) -> tuple[MpsDaemonStatus, ...]:
        match request:
            case protocol.Ping():
                return ()
            case protocol.Status():
                return self._supervisor.status()
            case protocol.Ensure(spec, timeout_s):
                return (self._supervisor.ensure(spec, timeout_s),)
            case protocol.Stop(device, timeout_s, gpu_uuid, kind):
                self._supervisor.stop(device, timeout_s, gpu_uuid=gpu_uuid, kind=kind)
                return ()


def _may_ask(connection: socket.socket) -> bool:
    try:
        uid = peer_uid(connection)
    except (OSError, struct.error):
        return False
    if uid in (0, os.geteuid()):
        return True
    _log.warning("mps_caller_refused", uid=uid)
    return False
