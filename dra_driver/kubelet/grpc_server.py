"""A gRPC server of threads: one that accepts, one for each connection that reads, and the workers that answer.

The server of the package grpcio takes 12 MiB and ten threads, and wakes thirty times a second, in a process that is
asked twice for a pod. Here nothing runs until something comes. HTTP/2 is the library h2's; `grpc_wire` has the rest of
the protocol. The tests call it with grpcio, `make e2e` with the kubelet's grpc-go.

    a call:  headers ──▶ body ──its end──▶ a worker runs the handler ──▶ answer, trailers
                 │         │         └── refused: too many, the server stops
                 │         └── refused: too large
                 └── refused: not known
    and at any time:  the caller resets the call or its connection ends ──▶ `Caller` says so, the handler's answer
                      is dropped
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from h2 import events
from h2.exceptions import ProtocolError

from dra_driver.kubelet.grpc_wire import (
    CONTENT_TYPE,
    PREFIX_BYTES,
    Headers,
    RpcError,
    Status,
    framed,
    http2,
    timeout_s,
    trailers,
    unframed,
)
from dra_driver.kubelet.workers import Workers

_log = structlog.get_logger(__name__)

_READ_BYTES = 65536
_MAX_UNHEARD_BYTES = 65536
"""h2 looks at the length of a frame only when all of it is there, and some have 16 MiB."""
_BACKLOG = 128
_SEND_TIMEOUT_S = 10
_AFTER_GRACE_S = 1.0
_ACCEPT_AGAIN_S = 1.0
"""No descriptor is left, for example."""
_KEEPALIVE_S = 60
_MAX_SHOWN = 128
_ANSWERED: Headers = [(":status", "200"), ("content-type", CONTENT_TYPE)]


class Message(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802  protobuf's name


@dataclass(frozen=True, slots=True)
class Method:
    """What answers the calls of one method: `behavior` gets the request and the Caller. It returns the answer, or where
    `is_stream` a generator of answers. What it raises, beside RpcError, is a mistake of ours."""

    behavior: Callable[[Any, Caller], Any]
    parse: Callable[[bytes], Any]
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections and calls a server has at the same time, and the bytes of one request and one answer.

    A connection too many ends the oldest one that has no call: were the newest refused, a client that keeps many could
    keep others out. A connection without a call ends after `idle_s` too.
    """

    connections: int
    calls: int
    request_bytes: int
    answer_bytes: int
    idle_s: float | None = None


class Caller:
    """What a handler may know of who called, from any thread."""

    def __init__(self, patience_s: float | None) -> None:
        self._ends_at = None if patience_s is None else time.monotonic() + patience_s
        self._guard = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._is_there = True

    def time_remaining(self) -> float | None:
        """Seconds until the caller gives up; None if it has no time limit."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def is_active(self) -> bool:
        """Whether anybody waits for the answer."""
        return self._is_there and (self._ends_at is None or time.monotonic() < self._ends_at)

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Has `callback` called when the call is over; it must not block. False if the call is over now."""
        with self._guard:
            if self._is_there:
                self._callbacks.append(callback)
            return self._is_there

    def leave(self) -> None:
        """The call is over. Harmless twice."""
        with self._guard:
            self._is_there = False
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@dataclass(slots=True)
class _Call:
    stream: int
    method: Method
    caller: Caller
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False  # its request is here: it has a worker, and counts
    has_begun: bool = False  # the headers of its answer are sent


class GrpcServer:
    """Serves `methods`, by their paths, in threads of `workers` from start() to stop(); used once."""

    def __init__(self, methods: Mapping[str, Method], workers: Workers, limits: Limits) -> None:
        self._methods = methods
        self._workers = workers
        self._limits = limits
        self._listening: socket.socket | None = None
        self._turn = threading.Condition()
        self._connections: dict[Connection, None] = {}  # oldest first
        self._calls = 0  # whose callers wait
        self._running = 0  # whose handlers run or wait for a worker: these, and those whose callers have left
        self._stopping = False

    def start(self, listening: socket.socket) -> None:
        """Takes calls on a bound socket, which is closed in the end. Raises: OSError."""
        self._listening = listening
        listening.listen(_BACKLOG)
        threading.Thread(target=self._accept, args=(listening,), name="grpc-accept", daemon=True).start()

    def stop(self, grace_s: float) -> bool:
        """Takes no new calls, gives running ones `grace_s` seconds, then leaves their callers without an answer. False
        if a handler goes on nevertheless. Harmless before start."""
        with self._turn:
            self._stopping = True
            if self._listening is not None:
                with suppress(OSError):  # it ends the accepting thread
                    self._listening.shutdown(socket.SHUT_RDWR)
                self._listening.close()
            self._turn.wait_for(lambda: not self._calls, grace_s)
            connections = list(self._connections)
        until = time.monotonic() + _AFTER_GRACE_S
        for connection in connections:
            connection.close(until - time.monotonic())
        with self._turn:
            ended = self._turn.wait_for(lambda: not self._running, _AFTER_GRACE_S)
        self._workers.shutdown(wait=False)
        return ended

    def called(self, headers: Mapping[str, str]) -> tuple[Method, Caller]:
        """The method that is called, and by whom. Raises: RpcError."""
        path = headers.get(":path", "")
        method = self._methods.get(path)
        if method is None:
            raise RpcError(Status.UNIMPLEMENTED, f"method {path[:_MAX_SHOWN]} is not known")
        return method, Caller(timeout_s(headers.get("grpc-timeout")))

    def end(self) -> None:
        """A call that was run is over for its caller."""
        with self._turn:
            self._calls -= 1
            self._turn.notify_all()

    def run(self, work: Callable[[], None]) -> None:
        """Have a handler run by a worker; the call counts until end(). Raises: RpcError."""
        with self._turn:
            if self._stopping:
                raise RpcError(Status.UNAVAILABLE, "the driver stops")
            # A handler goes on after its caller has left, and counts until it ends.
            if self._running >= self._limits.calls:
                raise RpcError(
                    Status.RESOURCE_EXHAUSTED, f"more than {self._limits.calls} calls are under way"
                )
            self._calls += 1
            self._running += 1

        def counted() -> None:
            try:
                work()
            finally:
                with self._turn:
                    self._running -= 1
                    self._turn.notify_all()

        try:
            self._workers.submit(counted)
        except RuntimeError as error:
            with self._turn:
                self._calls -= 1
                self._running -= 1
            raise RpcError(Status.UNAVAILABLE, "the driver stops") from error

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        with self._turn:
            self._connections.pop(connection, None)

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopping:
            try:
                accepted, _ = listening.accept()
            except OSError as error:
                if self._stopping:
                    return
                _log.warning("connection_not_accepted", reason=str(error))
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            self._welcome(Connection(self, accepted, self._limits))

    def _welcome(self, connection: Connection) -> None:
        with self._turn:
            too_many = None
            if len(self._connections) >= self._limits.connections:
                oldest = next(iter(self._connections))
                too_many = next((other for other in self._connections if not other.is_busy), oldest)
                del self._connections[too_many]
            self._connections[connection] = None
        if too_many is not None:
            too_many.cut()
        try:
            threading.Thread(target=connection.serve, name="grpc-connection", daemon=True).start()
        except RuntimeError as error:
            _log.warning("connection_not_accepted", reason=str(error))
            self.forget(connection)
            connection.close()
        if self._stopping:
            connection.close()


class Connection:
    """One connection. Its thread reads; workers write their answers themselves.

    `_turn` guards what h2 knows, the calls, and the order of the bytes that are sent.
    """

    def __init__(self, server: GrpcServer, accepted: socket.socket, limits: Limits) -> None:
        self._server = server
        self._socket = accepted
        self._limits = limits
        self._http2 = http2(is_client=False, max_calls=limits.calls)
        self._turn = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._is_open = True
        self._unheard_bytes = 0  # since something was heard

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls)

    def serve(self) -> None:
        """Read until the other end leaves."""
        try:
            self._configure()
            with self._turn:
                self._http2.initiate_connection()
                self._flush()
            while self._is_open and (data := self._read()):
                self.take(data)
        except (OSError, ProtocolError) as error:
            _log.debug("connection_failed", reason=f"{type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001  one connection must not end with a traceback on stderr
            _log.exception("connection_failed")
        finally:
            self.close()
            self._socket.close()
            self._server.forget(self)

    def close(self, patience_s: float = _AFTER_GRACE_S) -> None:
        """End the connection: whoever still waits at its other end hears no answer. Harmless twice."""
        # An answer that is being sent arrives; one that nobody reads does not hold us up.
        if not self._turn.acquire(timeout=max(0.0, patience_s)):
            self.cut()
            self._turn.acquire()
        try:
            self._is_open = False
            calls, self._calls = list(self._calls.values()), {}
            self._turn.notify_all()
            self.cut()
        finally:
            self._turn.release()
        for call in calls:
            call.caller.leave()
            if call.is_whole:
                self._server.end()

    def cut(self) -> None:
        """Nothing is sent or read any more, without a wait for `_turn`; then its thread ends, and takes the calls
        along."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _configure(self) -> None:
        # A caller that does not read would keep a worker for ever, as in _send().
        for option, seconds in (
            (socket.SO_SNDTIMEO, _SEND_TIMEOUT_S),
            (socket.SO_RCVTIMEO, self._limits.idle_s),
        ):
            if seconds is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A watcher whose machine is gone never says so.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)

    def _read(self) -> bytes:
        """What comes next; empty when nothing comes any more."""
        while True:
            try:
                return self._socket.recv(_READ_BYTES)
            except BlockingIOError:  # `idle_s` is over
                if not self._calls:
                    return b""

    def take(self, data: bytes) -> None:
        """What the other end sent next. Raises: ProtocolError if that is not HTTP/2."""
        over: list[_Call] = []
        with self._turn:
            try:
                heard = self._http2.receive_data(data)
                self._unheard_bytes = 0 if heard else self._unheard_bytes + len(data)
                if self._unheard_bytes > _MAX_UNHEARD_BYTES:
                    raise ProtocolError("a frame is too long")
                for event in heard:
                    call = self._heard(event)
                    if call is not None:
                        over.append(call)
            except ProtocolError:
                self._is_open = False  # h2 sends no answer after it
                raise
            finally:
                self._flush()
        for call in over:
            call.caller.leave()

    def _heard(self, event: events.Event) -> _Call | None:
        """Returns a call that its caller has taken back. The caller holds `_turn`."""
        match event:
            case events.RequestReceived():
                self._began(event.stream_id, event.headers)
            case events.DataReceived():
                # The answer to a call that was refused is on its way.
                self._http2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                self._collect(event.stream_id, event.data)
            case events.StreamEnded():
                self._dispatch(event.stream_id)
            case events.StreamReset():
                return self._over(event.stream_id)
            case events.WindowUpdated() | events.RemoteSettingsChanged():
                self._turn.notify_all()
            case events.ConnectionTerminated():
                self._is_open = False  # h2 sends no answer after it
        return None

    def _began(self, stream: int, headers: Any) -> None:
        try:
            method, caller = self._server.called(dict(headers))
        except RpcError as error:
            self._refuse(stream, error)
            return
        self._calls[stream] = _Call(stream, method, caller)

    def _collect(self, stream: int, data: bytes) -> None:
        call = self._calls.get(stream)
        if call is None:
            return
        call.body += data
        if len(call.body) > self._limits.request_bytes + PREFIX_BYTES:
            self._over(stream)
            text = f"the request has more than {self._limits.request_bytes} bytes"
            self._refuse(stream, RpcError(Status.RESOURCE_EXHAUSTED, text))

    def _dispatch(self, stream: int) -> None:
        call = self._calls.get(stream)
        if call is None:
            return
        try:
            self._server.run(lambda: self._answer(call))
            call.is_whole = True
        except RpcError as error:
            self._over(stream)
            self._refuse(stream, error)

    def _over(self, stream: int) -> _Call | None:
        """The call of a stream, which is over now; None if it was before. The caller holds `_turn`."""
        call = self._calls.pop(stream, None)
        if call is not None:
            if call.is_whole:
                self._server.end()
            self._turn.notify_all()
        return call

    def _refuse(self, stream: int, error: RpcError) -> None:
        """The caller holds `_turn`."""
        known = self._http2.streams.get(stream)
        if known is not None and not known.closed:  # what was read with the call may have taken it back
            self._end(stream, error.code, str(error), has_begun=False)

    def _end(self, stream: int, code: Status, text: str = "", *, has_begun: bool) -> None:
        """The caller holds `_turn`."""
        start = () if has_begun else _ANSWERED
        self._http2.send_headers(stream, [*start, *trailers(code, text)], end_stream=True)

    def _answer(self, call: _Call) -> None:
        """In a worker."""
        try:
            try:
                request = call.method.parse(unframed(call.body))
            except RpcError:
                raise
            except Exception as error:
                raise RpcError(Status.INTERNAL, f"the request cannot be read: {error}") from error
            call.body = bytearray()
            if call.method.is_stream:
                self._stream(call, call.method.behavior(request, call.caller))
            else:
                self._send(call, call.method.behavior(request, call.caller), is_last=True)
        except RpcError as error:
            self._fail(call, error)
        except Exception as error:  # noqa: BLE001  the edge of the process
            _log.exception("answer_failed")
            self._fail(call, RpcError(Status.INTERNAL, f"internal error: {type(error).__name__}"))
        finally:
            with self._turn:
                self._over(call.stream)
            call.caller.leave()

    def _stream(self, call: _Call, answers: Generator[Message, None, None]) -> None:
        with closing(answers):
            for answer in answers:
                if not self._send(call, answer, is_last=False):
                    return
        with self._turn:
            if self._is_waited_for(call):
                self._end(call.stream, Status.OK, has_begun=call.has_begun)
                self._flush()

    def _send(self, call: _Call, answer: Message, *, is_last: bool) -> bool:
        """One message, with what comes before and after it; whether its caller still waits. Raises: RpcError."""
        content = answer.SerializeToString()
        if len(content) > self._limits.answer_bytes:
            raise RpcError(
                Status.RESOURCE_EXHAUSTED, f"the answer has more than {self._limits.answer_bytes} bytes"
            )
        left = memoryview(framed(content))
        until = time.monotonic() + _SEND_TIMEOUT_S
        with self._turn:
            if not self._is_waited_for(call):
                return False
            if not call.has_begun:
                call.has_begun = True
                self._http2.send_headers(call.stream, _ANSWERED)
            while left:
                room = self._room(call, len(left))
                if not room:
                    self._flush()
                    in_time = self._turn.wait_for(
                        lambda: not self._is_waited_for(call) or self._room(call, 1), until - time.monotonic()
                    )
                    if not self._is_waited_for(call):
                        return False
                    if not in_time:
                        raise RpcError(Status.DEADLINE_EXCEEDED, "the caller does not read the answer")
                    continue
                self._http2.send_data(call.stream, bytes(left[:room]))
                left = left[room:]
            if is_last:
                self._end(call.stream, Status.OK, has_begun=True)
                self._over(call.stream)  # its caller has the answer before this worker goes on
            self._flush()
        return True

    def _fail(self, call: _Call, error: RpcError) -> None:
        with self._turn:
            if self._is_waited_for(call):
                self._end(call.stream, error.code, str(error), has_begun=call.has_begun)
                self._flush()

    def _is_waited_for(self, call: _Call) -> bool:
        """The caller holds `_turn`."""
        return self._is_open and call.stream in self._calls

    def _room(self, call: _Call, wanted: int) -> int:
        """How many bytes of a body may go out now. The caller holds `_turn`."""
        window = self._http2.local_flow_control_window(call.stream)
        return max(0, min(wanted, window, self._http2.max_outbound_frame_size))

    def _flush(self) -> None:
        """Send what h2 has made. The caller holds `_turn`. A connection that takes nothing ends."""
        data = self._http2.data_to_send()
        if not data:
            return
        try:
            self._socket.sendall(data)
        except OSError:
            self._is_open = False
            self._turn.notify_all()
            self.cut()
