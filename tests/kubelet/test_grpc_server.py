"""The gRPC servers against what no kubelet sends, callers that vanish, and more calls than they take."""

import os
import socket
import threading
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from dra_driver.errors import StateError
from dra_driver.kubelet import grpc_server, liveness
from dra_driver.kubelet.grpc_server import (
    MAX_CALLS,
    GrpcServer,
    RpcError,
    SocketServer,
    call_method,
    streaming,
    unary,
)
from dra_driver.kubelet.liveness import HealthServer, Liveness
from dra_driver.kubelet.pb import registration_pb2 as pb
from dra_driver.kubelet.sockets import listening
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kubelet.support import channel

PATH = "/a.B/C"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@contextmanager
def served(short_dir, behavior, kind=unary):
    server = SocketServer({"t": short_dir / "s.sock"}, {PATH: kind("C", behavior, pb.PluginInfo)})
    server.path = short_dir / "s.sock"
    server.start()
    try:
        yield server
    finally:
        server.stop(0)
        eventually(lambda: not handlers())


def handlers():
    return [thread for thread in threading.enumerate() if thread.name == "t"]


def named(name):
    return pb.PluginInfo(name=name)


def requested(path, name="x", *, timeout_s=PATIENCE_S):
    return call_method(path, PATH, named(name), pb.PluginInfo, timeout_s).name


def method_of(opened):
    return opened.unary_unary(PATH, pb.PluginInfo.SerializeToString, pb.PluginInfo.FromString)


def code_of(call, *args, **more):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **more)
    return caught.value.code(), caught.value.details()


def echo(request, _context):
    return request


class Waiting:
    """A handler that waits until it is released, and its contexts."""

    def __init__(self):
        self.contexts, self.left, self.opened = [], [], threading.Event()

    def __call__(self, request, context):
        self.contexts.append(context)
        context.add_callback(lambda: self.left.append(context))
        assert self.opened.wait(PATIENCE_S)
        return request


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 1000,
        os.urandom(1000),
        PREFACE + b"\xff" * 9 + b"x" * 1_000_000,
        PREFACE
        + b"\0\x40\0\x01\0\0\0\0\x01"
        + b"\0" * 16384
        + (b"\0\x40\0\x09\0\0\0\0\x01" + b"\0" * 16384) * 60,
        PREFACE + b"\0\0\x08\x06\0\0\0\0\x01" + b"12345678",
    ],
    ids=["http1", "zeros", "noise", "endless frame", "endless headers", "ping on a stream"],
)
def test_other_connections_are_served_when_someone_sends_garbage(short_dir, quiet_logs, content):
    with served(short_dir, echo) as server, channel(server.path) as other:
        assert method_of(other)(named("before"), timeout=PATIENCE_S).name == "before"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(server.path))
            client.settimeout(0.5)
            with suppress(OSError):  # the server may close before the end, or continue to read
                client.sendall(content)
                while client.recv(65536):
                    pass
        assert method_of(other)(named("after"), timeout=PATIENCE_S).name == "after"
    assert {line["event"] for line in quiet_logs} == {"socket_served", "rpc_received", "rpc_answered"}


def test_the_connection_lives_when_a_request_or_an_answer_is_too_large(short_dir, monkeypatch):
    monkeypatch.setattr(grpc_server, "MAX_REQUEST_BYTES", 100_000)
    monkeypatch.setattr(grpc_server, "MAX_ANSWER_BYTES", 300_000)

    def longer(request, _context):
        return named(request.name * 4)

    with served(short_dir, longer) as server, channel(server.path) as opened:
        method = method_of(opened)
        for length in (75_001, 1_000_000):
            code, _ = code_of(method, named("x" * length), timeout=PATIENCE_S)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(method(named("x" * 70_000), timeout=PATIENCE_S).name) == 280_000


def test_a_compressed_request_is_refused_when_it_would_grow_past_the_limit(short_dir):
    with served(short_dir, echo) as server, channel(server.path) as opened:
        bomb = named("x" * (grpc_server.MAX_REQUEST_BYTES * 8))
        code, _ = code_of(method_of(opened), bomb, timeout=PATIENCE_S, compression=grpc.Compression.Gzip)
        assert code is grpc.StatusCode.UNIMPLEMENTED


def test_512_calls_wait_and_the_others_are_refused_at_once_when_700_come(short_dir):
    waiting = Waiting()
    with served(short_dir, waiting) as server:
        with channel(server.path) as one, channel(server.path) as other:
            calls = [
                method_of(one if n % 2 else other).future(named(str(n)), timeout=PATIENCE_S)
                for n in range(700)
            ]
            refused = eventually(lambda: [call for call in calls if call.done()][699 - MAX_CALLS :])
            assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            eventually(lambda: len(waiting.contexts) == MAX_CALLS)
            waiting.opened.set()
            answers = [call.result().name for call in calls if call.exception() is None]
            assert len(answers) == len(set(answers)) == MAX_CALLS
        eventually(lambda: not handlers())
        assert requested(server.path) == "x"


@pytest.mark.parametrize("leave", ["cancels", "hangs up", "deadline"])
def test_the_handler_is_notified_when_its_caller_vanishes(short_dir, quiet_logs, leave):
    waiting = Waiting()
    with served(short_dir, waiting) as server:
        with channel(server.path) as opened:

            def received() -> Any:
                """A call whose handler runs; with a deadline it may be too late on its way already."""
                call = method_of(opened).future(
                    named("x"), timeout=0.5 if leave == "deadline" else PATIENCE_S
                )
                eventually(lambda: waiting.contexts or call.done())
                return waiting.contexts and call

            call = eventually(received)
            assert leave == "deadline" or waiting.contexts[0].is_active()
            if leave == "cancels":
                call.cancel()
            elif leave == "hangs up":
                opened.close()
            eventually(lambda: len(waiting.left) == len(waiting.contexts))
            assert not any(context.is_active() for context in waiting.contexts)
        assert len(handlers()) == len(waiting.contexts)
        waiting.opened.set()
        eventually(lambda: not handlers())
        assert requested(server.path) == "x"
    assert {line["log_level"] for line in quiet_logs} <= {"debug", "info"}


def test_calls_count_until_their_handlers_end_when_callers_take_them_back(short_dir, monkeypatch):
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 4)
    waiting = Waiting()
    with served(short_dir, waiting) as server, channel(server.path) as opened:
        for number in range(1, 5):
            call = method_of(opened).future(named("x"), timeout=PATIENCE_S)
            eventually(lambda number=number: len(waiting.contexts) == number)
            call.cancel()
        eventually(lambda: len(waiting.left) == 4)
        assert code_of(requested, server.path)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(waiting.contexts) == 4
        waiting.opened.set()
        eventually(lambda: not handlers())
        assert requested(server.path) == "x"


def test_the_socket_of_the_next_server_stays_when_this_one_stops_late(short_dir):
    waiting = Waiting()
    with served(short_dir, waiting) as server, channel(server.path) as opened:
        call = method_of(opened).future(named("x"), timeout=PATIENCE_S)
        eventually(lambda: waiting.contexts)
        stopping = threading.Thread(target=server.stop, args=(20,))
        stopping.start()
        eventually(lambda: not listening(server.path))
        with served(short_dir, echo) as following:
            waiting.opened.set()
            stopping.join(PATIENCE_S)
            assert call.result().name == "x"
            assert requested(following.path, "next") == "next"
            assert [path.name for path in short_dir.iterdir()] == ["s.sock"]


@pytest.mark.parametrize("text", ["a % b", "größe µ", "é" * 300, "plain", ""])
def test_the_text_of_an_error_arrives_as_it_is_when_a_handler_fails(short_dir, text):
    def fails(*_):
        raise RpcError(grpc.StatusCode.NOT_FOUND, text)

    with served(short_dir, fails) as server:
        assert code_of(requested, server.path) == (grpc.StatusCode.NOT_FOUND, text)


def test_a_stream_ends_when_its_handler_or_its_caller_ends(short_dir):
    def counts(request, context):
        ended = threading.Event()
        context.add_callback(ended.set)
        yield from (named(str(number)) for number in range(int(request.name)))
        if request.name == "3":
            raise RpcError(grpc.StatusCode.NOT_FOUND, "no more")
        assert ended.wait(PATIENCE_S)

    with served(short_dir, counts, streaming) as server, channel(server.path) as opened:
        method = opened.unary_stream(PATH, pb.PluginInfo.SerializeToString, pb.PluginInfo.FromString)
        seen = []
        assert code_of(lambda: seen.extend(method(named("3"), timeout=PATIENCE_S))) == (
            grpc.StatusCode.NOT_FOUND,
            "no more",
        )
        assert [message.name for message in seen] == ["0", "1", "2"]
        eventually(lambda: not handlers())
        endless = method(named("2"))
        assert [next(endless).name for _ in range(2)] == ["0", "1"]
        assert len(handlers()) == 1
        endless.cancel()
        eventually(lambda: not handlers())


def test_calls_are_reported_as_abandoned_when_a_handler_hangs_past_the_grace(
    short_dir, quiet_logs, monkeypatch
):
    monkeypatch.setattr(grpc_server, "_AFTER_GRACE_S", 0.05)
    waiting = Waiting()
    with served(short_dir, waiting) as server, channel(server.path) as opened:
        call = method_of(opened).future(named("x"), timeout=PATIENCE_S)
        [context] = eventually(lambda: waiting.contexts)
        server.stop(0)
        eventually(lambda: not context.is_active())
        assert call.exception() is not None
        waiting.opened.set()
        eventually(lambda: not handlers())
    abandoned = [line for line in quiet_logs if line["event"] == "calls_abandoned"]
    assert abandoned == [{"event": "calls_abandoned", "log_level": "warning", "server": "t", "grace_s": 0}]


def test_the_server_continues_when_no_thread_can_be_started(short_dir, quiet_logs, threads_that_start):
    with served(short_dir, echo) as server:
        threads_that_start("t", 0)

        def logged() -> list[Any]:
            """A call may be too late on its way already."""
            code, _ = code_of(requested, server.path, timeout_s=0.3)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            return [line["threads"] for line in quiet_logs if line["event"] == "worker_not_started"]

        assert set(eventually(logged)) == {0}
        threads_that_start("t", 1)
        assert requested(server.path) == "x"


def test_the_address_is_named_when_it_cannot_be_bound(short_dir):
    server = SocketServer({"t": short_dir / "missing" / "s.sock"}, {})
    with pytest.raises(
        StateError, match=r"cannot listen on .*/missing/s\.sock: gRPC cannot bind it; check the"
    ):
        server.start()


def test_connections_end_when_they_grow_old_whatever_their_callers_do(monkeypatch):
    """A caller that never finishes a request or never reads a response occupies a call no longer than that."""
    ages = {"grpc.max_connection_age_ms": 200, "grpc.max_connection_age_grace_ms": 100}
    options = tuple((name, ages.get(name, value)) for name, value in liveness._OPTIONS)
    assert ages.keys() <= dict(options).keys()
    monkeypatch.setattr(liveness, "_OPTIONS", options)
    server = HealthServer("127.0.0.1:0", Liveness(lambda: None), lambda: True)
    server.start()
    try:
        unfinished = PREFACE + b"\0\0\0\x01\x04\0\0\0\x01"
        for content in (b"", PREFACE, unfinished):
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
                client.sendall(content)
                while client.recv(65536):
                    pass
    finally:
        server.stop()


def test_more_connections_than_the_limit_are_turned_away_when_all_are_taken():
    options = (("grpc.max_allowed_incoming_connections", 2),)
    assert [name for name, _ in options] <= [name for name, _ in liveness._OPTIONS]
    server = GrpcServer("t", {}, calls=1, request_bytes=100, options=options)
    port = server.bind("127.0.0.1:0")
    server.start()
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as first,
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as second,
        ):
            assert first.recv(9)
            assert second.recv(9)
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as third:
                assert third.recv(9) == b""
    finally:
        server.stop(0)
