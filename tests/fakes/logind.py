"""systemd-logind as the kubelet knows it: a D-Bus server that announces a shutdown and waits for the kubelet.

Little of the protocol is here: one client at a time, the three methods that the kubelet calls, one signal.
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CALL, _RETURN, _SIGNAL = 1, 2, 4
_PATH, _INTERFACE, _MEMBER, _REPLY_SERIAL, _SENDER, _SIGNATURE, _UNIX_FDS = 1, 2, 3, 5, 7, 8, 9
_DELAY_US = 600_000_000
"""Longer than any grace of the kubelet, which would write a file for logind otherwise."""
_MEMBER_OF = re.compile(rb"\x03\x01s\x00....(\w+)\x00", re.DOTALL)

Field = tuple[int, str, str | int]


class Logind:
    """One that listens at `path` until it is closed."""

    def __init__(self, path: Path) -> None:
        self._held: int | None = None
        self._client: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.delays = threading.Event()
        """Set when the kubelet has a lock that delays the shutdown."""

    def shut_down(self) -> None:
        """Announce a shutdown."""
        assert self._client is not None
        fields = [
            (_PATH, "o", "/org/freedesktop/login1"),
            (_INTERFACE, "s", "org.freedesktop.login1.Manager"),
            (_MEMBER, "s", "PrepareForShutdown"),
            (_SIGNATURE, "g", "b"),
        ]
        self._client.sendall(_message(_SIGNAL, fields, struct.pack("<I", 1)))

    def may_go(self) -> bool:
        """Whether the kubelet has given the lock back, by closing it."""
        return self._held is not None and bool(select.select([self._held], [], [], 0)[0])

    def close(self) -> None:
        for one in (self._listener, self._client):
            if one is not None and one.fileno() >= 0:
                one.shutdown(socket.SHUT_RDWR)  # which wakes the thread, as a close does not
        self._thread.join()
        self._listener.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _serve(self) -> None:
        while True:
            try:
                self._client, _ = self._listener.accept()
                with self._client, self._client.makefile("rb") as stream:
                    self._admit(stream.readline)
                    self._answer(stream.read)
            except struct.error:  # the client is gone
                continue
            except OSError:
                return

    def _admit(self, line: Callable[[], bytes]) -> None:
        answers = {b"AUTH": b"REJECTED EXTERNAL", b"NEGOTIATE_UNIX_FD": b"AGREE_UNIX_FD"}
        while (said := line()) and not said.startswith(b"BEGIN"):
            words = said.strip(b"\0\r\n").split()
            answer = b"OK " + b"0" * 32 if len(words) > 1 else answers[words[0]]
            self._send(answer + b"\r\n")

    def _answer(self, read: Callable[[int], bytes]) -> None:
        while True:
            head = read(16)
            body, serial, fields = struct.unpack("<4xIII", head)
            rest = read(fields + -fields % 8 + body)
            member = _MEMBER_OF.search(rest)
            if head[1] != _CALL or member is None:
                continue
            reply: list[Field] = [(_REPLY_SERIAL, "u", serial), (_SENDER, "s", "org.freedesktop.login1")]
            match member[1]:
                case b"Hello":
                    name = b":1.1"
                    content = struct.pack("<I", len(name)) + name + b"\0"
                    self._send(_message(_RETURN, [*reply, (_SIGNATURE, "g", "s")], content))
                case b"Get":  # InhibitDelayMaxUSec is all that is asked for
                    content = b"\x01t\0" + bytes(5) + struct.pack("<Q", _DELAY_US)
                    self._send(_message(_RETURN, [*reply, (_SIGNATURE, "g", "v")], content))
                case b"Inhibit":
                    self._let_go()
                    self._held, lock = os.pipe()
                    reply += [(_SIGNATURE, "g", "h"), (_UNIX_FDS, "u", 1)]
                    self._send(_message(_RETURN, reply, struct.pack("<I", 0)), lock)
                    os.close(lock)  # the kubelet alone has it now
                    self.delays.set()
                case _:
                    self._send(_message(_RETURN, reply))

    def _send(self, message: bytes, *descriptors: int) -> None:
        assert self._client is not None
        if descriptors:
            socket.send_fds(self._client, [message], descriptors)
        else:
            self._client.sendall(message)


def _message(kind: int, fields: list[Field], body: bytes = b"") -> bytes:
    """Of the serial 1: nobody answers ours."""
    out = b""
    for code, signature, value in fields:
        out += bytes(-len(out) % 8) + bytes((code, 1)) + signature.encode() + b"\0"
        if isinstance(value, int):
            out += struct.pack("<I", value)
        elif signature == "g":
            out += bytes((len(value),)) + value.encode() + b"\0"
        else:
            out += struct.pack("<I", len(value)) + value.encode() + b"\0"
    head = struct.pack("<4B3I", ord("l"), kind, 0, 1, len(body), 1, len(out))
    return head + out + bytes(-len(out) % 8) + body


@contextmanager
def listening(path: Path) -> Iterator[Logind]:
    """A logind at `path`, which is gone afterwards."""
    logind = Logind(path)
    try:
        yield logind
    finally:
        logind.close()
        path.unlink()
