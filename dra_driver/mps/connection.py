"""Unix sockets: whole lines, who is at the other end, and addresses of any length."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.mps.protocol import LARGEST_MESSAGE, ProtocolError

_CHUNK = 65536


def read_line(connection: socket.socket, buffer: bytearray, deadline: float | None = None) -> bytes | None:
    """The next line without its end; None at the end of the stream. `buffer` keeps what was read too far. With
    `deadline` (time.monotonic()) the whole line has to come by then.

    Raises: ProtocolError for a line that is too long or breaks off, OSError; TimeoutError.
    """
    while (end := buffer.find(b"\n")) < 0:
        if len(buffer) > LARGEST_MESSAGE:
            raise ProtocolError(f"a message is longer than {LARGEST_MESSAGE} bytes")
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        chunk = connection.recv(_CHUNK)
        if not chunk:
            if buffer:
                raise ProtocolError("the message breaks off")
            return None
        buffer += chunk
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end. Raises: OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """An address for a socket at `path`, however long that is. Raises: OSError."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
