"""The gRPC server against what no kubelet sends, and the client against what no driver answers."""

import gzip
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import PingAckReceived, RemoteSettingsChanged, StreamEnded, TrailersReceived
from h2.settings import SettingCodes

from dra_driver.kubelet.grpc_client import call
from dra_driver.kubelet.grpc_server import GrpcServer, Limits, Method
from dra_driver.kubelet.grpc_wire import RpcError, Status, framed, timeout_s, trailers
from dra_driver.kubelet.pb import registration_pb2
from dra_driver.kubelet.workers import Workers
from tests.kubelet.support import channel, eventually

PATH = "/a.B/C"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
LIMITS = Limits(connections=8, calls=16, request_bytes=100_000, answer_bytes=3_000_000)


class Bytes:
    """A message that is its own text."""

    def __init__(self, content=b""):
        self.content = content

    def SerializeToString(self):  # noqa: N802  protobuf's name
        return self.content

    @classmethod
    def FromString(cls, content):  # noqa: N802
        return cls(content)


@contextmanager
def served(short_dir, behavior, *, limits=LIMITS, workers=32, is_stream=False):
    path = short_dir / "s.sock"
    server = GrpcServer(
        {PATH: Method(behavior, Bytes.FromString, is_stream)}, Workers("t", limit=workers), limits
    )
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    server.start(bound)
    try:
        yield path, server
    finally:
        server.stop(0)
        eventually(
            lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("grpc-")]
        )


def echo(request, _caller):
    return Bytes(request.content)


def asked(path, content=b"x", *, timeout=20, method=PATH, options=(), **more):
    with channel(path, *options) as opened:
        return opened.unary_unary(method)(content, timeout=timeout, **more)


def code_of(path, *args, **more):
    with pytest.raises(grpc.RpcError) as caught:
        asked(path, *args, **more)
    return caught.value.code(), caught.value.details()


class Raw:
    """A client that says what it likes."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self.http2 = H2Connection(
            H2Configuration(
                header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self.http2.initiate_connection()
        self.flush()
        self.until(RemoteSettingsChanged)

    def flush(self):
        self.socket.sendall(self.http2.data_to_send())

    def begin(self, path=PATH, **more):
        stream = self.http2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "x"),
            *more.items(),
        ]
        self.http2.send_headers(stream, headers)
        return stream

    def until(self, kind):
        """The events up to the first of the kind; None if the connection ends before."""
        seen = []
        while True:
            data = self.socket.recv(65536)
            if not data:
                return None
            seen += self.http2.receive_data(data)
            with suppress(BrokenPipeError):
                self.flush()
            if any(isinstance(event, kind) for event in seen):
                return seen


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
def test_nonsense_ends_its_connection_only_and_nobody_is_told(short_dir, quiet_logs, content):
    with served(short_dir, echo) as (path, _), channel(path) as other:
        assert other.unary_unary(PATH)(b"before", timeout=20) == b"before"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(path))
            with suppress(OSError):  # the server may have left before the end
                client.sendall(content)
                while client.recv(65536):
                    pass
        assert other.unary_unary(PATH)(b"after", timeout=20) == b"after"
    assert [line for line in quiet_logs if line["log_level"] != "debug"] == []


def test_a_connection_may_send_byte_by_byte(short_dir):
    with served(short_dir, echo) as (path, _):
        client = H2Connection()
        client.initiate_connection()
        client.send_headers(
            1,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", PATH),
                (":authority", "x"),
                ("te", "trailers"),
            ],
        )
        client.send_data(1, framed(b"slow"), end_stream=True)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(path))
            for byte in client.data_to_send():
                connection.sendall(bytes([byte]))
            events = []
            while not any(isinstance(event, StreamEnded) for event in events):
                events += client.receive_data(connection.recv(65536))
        assert any(getattr(event, "data", None) == framed(b"slow") for event in events)


def test_answers_larger_than_every_window_arrive_whole(short_dir):
    content = os.urandom(2_500_000)
    with served(short_dir, lambda *_: Bytes(content)) as (path, _):
        assert asked(path) == content
        with channel(path) as opened:
            several = [opened.unary_unary(PATH).future(b"", timeout=30) for _ in range(4)]
            assert [one.result() == content for one in several] == [True] * 4


def test_answers_and_requests_over_the_limit_are_refused_and_the_connection_lives(short_dir):
    with served(short_dir, lambda *_: Bytes(b"x" * 3_000_001)) as (path, _):
        assert code_of(path) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer has more than 3000000 bytes")
    (short_dir / "s.sock").unlink()
    with served(short_dir, echo) as (path, _), channel(path) as opened:
        ask = opened.unary_unary(PATH)
        assert len(ask(b"x" * 100_000, timeout=20)) == 100_000
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"x" * 1_000_000, timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ask(b"still there", timeout=20) == b"still there"


def test_what_gRPC_has_and_this_server_has_not_is_refused_by_name(short_dir):  # noqa: N802
    with served(short_dir, echo) as (path, _):
        assert code_of(path, method="/a.B/D") == (grpc.StatusCode.UNIMPLEMENTED, "method /a.B/D is not known")
        code, text = code_of(path, b"x" * 50_000, compression=grpc.Compression.Gzip)
        assert (code, text) == (grpc.StatusCode.UNIMPLEMENTED, "compressed messages are not understood")
        raw = Raw(path)
        for body, told in (
            (b"", "the call has no message"),
            (framed(b"one") + framed(b"two"), "the call has not exactly one whole message"),
            (framed(b"one")[:-1], "the call has not exactly one whole message"),
            (b"\1" + framed(gzip.compress(b"x"))[1:], "compressed messages are not understood"),
        ):
            raw.http2.send_data(raw.begin(), body, end_stream=True)
            raw.flush()
            [ended] = [event for event in raw.until(StreamEnded) if isinstance(event, TrailersReceived)] or [
                None
            ]
            headers = dict(ended.headers) if ended else {}
            assert headers.get("grpc-message", told) == told
        raw.socket.close()


@pytest.mark.parametrize("text", ["", "5", "S", "-1S", "1.5S", "123456789S", "1s", "1S\n", "٣S"])
def test_a_timeout_that_is_not_valid_is_refused(text):
    with pytest.raises(RpcError, match="grpc-timeout"):
        timeout_s(text)


def test_timeouts_of_every_unit():
    values = [timeout_s(f"2{unit}") for unit in "HMSmun"]
    assert values == pytest.approx([7200, 120, 2, 2e-3, 2e-6, 2e-9])
    assert timeout_s(None) is None
    assert timeout_s("99999999H") is None


@pytest.mark.parametrize("text", ["a % b", "größe\n\tµ", "é" * 300, "plain", ""])
def test_error_texts_survive_the_header(short_dir, text):
    def fails(*_):
        raise RpcError(Status.NOT_FOUND, text)

    with served(short_dir, fails) as (path, _):
        assert code_of(path) == (grpc.StatusCode.NOT_FOUND, text)


def test_a_mistake_in_a_handler_is_one_error_of_its_call(short_dir, quiet_logs):
    def fails(*_):
        raise ValueError("secret")

    with served(short_dir, fails) as (path, _):
        assert code_of(path) == (grpc.StatusCode.INTERNAL, "internal error: ValueError")
    assert [line["event"] for line in quiet_logs if line["log_level"] == "error"] == ["answer_failed"]


def test_a_reader_that_does_not_read_frees_its_worker_when_it_leaves(short_dir):
    callers = []

    def large(_request, caller):
        callers.append(caller)
        return Bytes(b"x" * 3_000_000)

    with served(short_dir, large) as (path, server):
        raw = Raw(path)
        raw.http2.send_data(raw.begin(), framed(b""), end_stream=True)
        raw.flush()
        eventually(lambda: callers)
        assert server._running == 1
        raw.socket.close()
        eventually(lambda: server._running == 0)
        assert not callers[0].is_active()


def test_calls_that_are_taken_back_at_once_queue_no_more_than_the_limit(short_dir):
    gate = threading.Event()
    begun = []

    def waits(*_):
        begun.append(1)
        gate.wait(20)
        return Bytes()

    with served(short_dir, waits, workers=2) as (path, server):
        raw = Raw(path)
        for _ in range(500):
            stream = raw.begin()
            raw.http2.send_data(stream, framed(b""), end_stream=True)
            raw.http2.reset_stream(stream)
        raw.http2.ping(b"01234567")
        raw.flush()
        raw.until(PingAckReceived)
        assert server._running <= LIMITS.calls
        assert code_of(path)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.set()
        eventually(lambda: server._running == 0)
        assert asked(path) == b""
        assert len(begun) <= LIMITS.calls + 1
        raw.socket.close()


def test_a_refused_call_that_is_taken_back_at_once_harms_no_other(short_dir):
    gate = threading.Event()

    def waits(*_):
        gate.wait(20)
        return Bytes(b"done")

    with served(short_dir, waits) as (path, server):
        raw = Raw(path)
        other = raw.begin()
        raw.http2.send_data(other, framed(b""), end_stream=True)
        raw.flush()
        eventually(lambda: server._running == 1)
        for method, body in ((PATH, b"x" * 16_000), ("/unknown", b"")):
            stream = raw.begin(method)
            for _ in range(3):  # more than LIMITS allow
                raw.http2.send_data(stream, framed(body))
            raw.http2.reset_stream(stream)
        raw.flush()
        gate.set()
        events = raw.until(StreamEnded)
        assert events
        assert [event.stream_id for event in events if isinstance(event, StreamEnded)] == [other]
        raw.socket.close()


@pytest.mark.parametrize("last", ["nonsense", "goodbye"])
def test_a_caller_that_leaves_with_its_connection_is_no_mistake_of_ours(short_dir, quiet_logs, last):
    callers = []

    def waits(_request, caller):
        left = threading.Event()
        callers.append(caller)
        if caller.add_callback(left.set):
            assert left.wait(20), "nobody said that the caller left"
        return Bytes(b"late")

    with served(short_dir, waits) as (path, server):
        raw = Raw(path)
        stream = raw.begin()
        raw.http2.send_data(stream, framed(b""), end_stream=True)
        raw.flush()
        eventually(lambda: callers)
        if last == "goodbye":
            raw.http2.close_connection()
        else:
            raw.http2.reset_stream(stream)
        raw.socket.sendall(raw.http2.data_to_send() + (b"\xff" * 20 if last == "nonsense" else b""))
        eventually(lambda: server._running == 0)
        assert not callers[0].is_active()
        raw.socket.close()
    assert [line for line in quiet_logs if line["log_level"] != "debug"] == []


def test_a_caller_that_opens_no_window_holds_no_worker_for_ever(short_dir, monkeypatch):
    monkeypatch.setattr("dra_driver.kubelet.grpc_server._SEND_TIMEOUT_S", 1)
    with served(short_dir, echo) as (path, server):
        raw = Raw(path)
        raw.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        raw.http2.send_data(raw.begin(), framed(b"x"), end_stream=True)
        raw.flush()
        [ended] = [event for event in raw.until(TrailersReceived) if isinstance(event, TrailersReceived)]
        assert dict(ended.headers)["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))
        eventually(lambda: server._running == 0)
        raw.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65535})
        raw.http2.send_data(raw.begin(), framed(b"y"), end_stream=True)
        raw.flush()
        events = raw.until(TrailersReceived)
        assert framed(b"y") in [getattr(event, "data", None) for event in events]
        raw.socket.close()


def is_taken(turn):
    if turn.acquire(blocking=False):
        turn.release()
        return False
    return True


@pytest.mark.parametrize("end", [lambda path, _: asked(path, b"y"), lambda _, server: server.stop(0)])
def test_a_caller_that_reads_nothing_holds_up_neither_new_connections_nor_the_stop(
    short_dir, monkeypatch, end
):
    monkeypatch.setattr("dra_driver.kubelet.grpc_server._SEND_TIMEOUT_S", 20)
    limits = Limits(connections=3, calls=16, request_bytes=1000, answer_bytes=1000)
    with served(short_dir, echo, limits=limits) as (path, server):
        raws = [Raw(path) for _ in range(limits.connections)]
        for raw in raws:
            raw.socket.settimeout(0.2)
            with suppress(TimeoutError):
                while True:  # until the server's answers fill the socket, and it reads no more
                    raw.socket.sendall((b"\0\0\x08\x06\0\0\0\0\0" + b"12345678") * 1000)
        eventually(lambda: all(is_taken(connection._turn) for connection in server._connections))
        over = threading.Event()
        threading.Thread(target=lambda: (end(path, server), over.set()), daemon=True).start()
        assert over.wait(15), "the other waits as long as a send may take"
        for raw in raws:
            raw.socket.close()


def test_a_watcher_whose_machine_is_gone_is_found_out():
    server = GrpcServer({}, Workers("t", limit=1), LIMITS)
    bound = socket.create_server(("127.0.0.1", 0))
    server.start(bound)
    with socket.create_connection(bound.getsockname()) as client:
        assert client.recv(9)
        [connection] = server._connections
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
    server.stop(0)


def test_a_caller_that_ends_no_request_keeps_nobody_out(short_dir):
    with served(short_dir, echo) as (path, _):
        raw = Raw(path)
        for _ in range(LIMITS.calls):
            raw.begin()
        raw.http2.ping(b"01234567")
        raw.flush()
        assert raw.until(PingAckReceived)
        assert asked(path, b"other") == b"other"
        raw.socket.close()


def test_error_texts_are_not_remembered(short_dir):
    """A caller may ask for a table of any size, and a connection lives for weeks."""
    with served(short_dir, echo) as (path, server):
        raw = Raw(path)
        raw.http2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 2**31})
        for number in range(100):
            stream = raw.begin(f"/{number}")
            raw.http2.send_data(stream, b"", end_stream=True)
            raw.flush()
            assert raw.until(StreamEnded)
        [connection] = server._connections
        assert len(connection._http2.encoder.header_table.dynamic_entries) < 10
        raw.socket.close()


def test_a_connection_of_weeks_remembers_few_of_its_calls(short_dir):
    with served(short_dir, echo) as (path, server), channel(path) as opened:
        ask = opened.unary_unary(PATH)
        for _ in range(600):
            ask(b"x", timeout=20)
        [connection] = server._connections
        assert len(connection._http2.streams) < 10
        assert len(connection._http2._closed_streams) <= 128
        assert not connection._calls


def test_a_connection_too_many_ends_the_oldest_without_a_call(short_dir):
    gate = threading.Event()

    def waits(request, _caller):
        if request.content == b"wait":
            gate.wait(20)
        return Bytes()

    with served(short_dir, waits) as (path, server):
        busy = Raw(path)
        busy.http2.send_data(busy.begin(), framed(b"wait"), end_stream=True)
        busy.flush()
        eventually(lambda: server._running == 1)
        idle = [Raw(path) for _ in range(20)]
        assert len(server._connections) <= LIMITS.connections
        assert asked(path, b"") == b""
        gate.set()
        assert busy.until(StreamEnded)
        assert idle[0].until(StreamEnded) is None
        for raw in (busy, *idle):
            raw.socket.close()


def test_a_connection_without_a_call_ends_and_one_with_a_call_does_not(short_dir):
    gate = threading.Event()

    def waits(*_):
        gate.wait(20)
        return Bytes(b"late")

    limits = Limits(connections=8, calls=16, request_bytes=1000, answer_bytes=1000, idle_s=1.0)
    with served(short_dir, waits, limits=limits) as (path, _):
        idle, busy = Raw(path), Raw(path)
        busy.http2.send_data(busy.begin(), framed(b""), end_stream=True)
        busy.flush()
        assert idle.until(StreamEnded) is None
        time.sleep(1.2)
        gate.set()
        assert busy.until(StreamEnded)
        for raw in (idle, busy):
            raw.socket.close()


def test_a_stream_ends_with_its_handler_or_its_caller(short_dir):
    ended = threading.Event()

    def counts(request, caller):
        caller.add_callback(ended.set)
        for number in range(int(request.content)):
            yield Bytes(str(number).encode())
        if request.content == b"3":
            raise RpcError(Status.NOT_FOUND, "no more")
        while caller.is_active():
            ended.wait(20)

    with served(short_dir, counts, is_stream=True) as (path, server), channel(path) as opened:
        answers = opened.unary_stream(PATH)(b"3", timeout=20)
        seen = []
        with pytest.raises(grpc.RpcError) as caught:
            seen.extend(answers)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        ended.clear()
        forever = opened.unary_stream(PATH)(b"5")
        assert [next(forever) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        assert server._running == 1
        forever.cancel()
        eventually(lambda: server._running == 0)


def test_stop_gives_calls_their_time_and_refuses_new_ones_on_open_connections(short_dir):
    gate, entered = threading.Event(), threading.Event()

    def waits(*_):
        entered.set()
        gate.wait(20)
        return Bytes(b"done")

    with served(short_dir, waits) as (path, server), channel(path) as opened:
        first = opened.unary_unary(PATH).future(b"", timeout=20)
        assert entered.wait(20)
        stopped = []
        stopper = threading.Thread(target=lambda: stopped.append(server.stop(20)))
        stopper.start()
        eventually(lambda: server._stopping)
        with pytest.raises(grpc.RpcError) as caught:
            opened.unary_unary(PATH)(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gate.set()
        assert first.result() == b"done"
        stopper.join(20)
        assert stopped == [True]


def test_stop_says_that_a_handler_hangs(short_dir):
    gate, entered = threading.Event(), threading.Event()

    def hangs(_request, caller):
        entered.set()
        gate.wait(20)
        return Bytes(b"" if caller.is_active() else b"late")

    with served(short_dir, hangs) as (path, server), channel(path) as opened:
        asking = opened.unary_unary(PATH).future(b"", timeout=20)
        assert entered.wait(20)
        assert server.stop(0) is False
        with pytest.raises(grpc.RpcError):
            asking.result()
        gate.set()
        eventually(lambda: server._running == 0)


def info(path, within_s=5.0):
    return call(path, PATH, registration_pb2.InfoRequest(), registration_pb2.PluginInfo, within_s)


def answering(path, respond):
    """A server that answers the first bytes of one connection with `respond`."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def run():
        accepted, _ = listening.accept()
        with accepted, listening:
            respond(accepted)

    threading.Thread(target=run, daemon=True).start()


def respond_with(*headers, body=b"", reset=False):
    def respond(accepted):
        server = H2Connection(
            H2Configuration(
                client_side=False, validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        server.initiate_connection()
        ended = False
        while not ended:
            ended = any(isinstance(event, StreamEnded) for event in server.receive_data(accepted.recv(65536)))
        server.send_headers(1, [(":status", "200")])
        server.send_data(1, body)
        if reset:
            server.reset_stream(1)
        else:
            server.send_headers(1, headers or [("x", "y")], end_stream=True)
        accepted.sendall(server.data_to_send())
        accepted.recv(65536)

    return respond


GOOD = framed(registration_pb2.PluginInfo(name="gpu").SerializeToString())


@pytest.mark.parametrize(
    ("respond", "code", "told"),
    [
        (
            lambda accepted: accepted.sendall(b"\0\0\x08\x06\0\0\0\0\x0112345678") or accepted.recv(9),
            Status.UNAVAILABLE,
            "not HTTP/2",
        ),
        (lambda accepted: None, Status.UNAVAILABLE, "closed|reset|Broken pipe|Connection"),
        (lambda accepted: time.sleep(1), Status.DEADLINE_EXCEEDED, "no answer within 0.5 s"),
        (respond_with(*trailers(Status.NOT_FOUND, "gone")), Status.NOT_FOUND, "gone"),
        (respond_with(("grpc-status", "99")), Status.UNKNOWN, "^$"),
        (respond_with(("grpc-status", "x")), Status.UNKNOWN, "^$"),
        (respond_with(), Status.UNKNOWN, "no status"),
        (respond_with(*trailers(Status.OK)), Status.INTERNAL, "no message"),
        (respond_with(*trailers(Status.OK), body=framed(b"\xff")), Status.INTERNAL, "cannot be read"),
        (respond_with(reset=True), Status.UNAVAILABLE, "cut off"),
    ],
    ids=[
        "no HTTP/2",
        "nothing",
        "silence",
        "error",
        "unknown status",
        "no number",
        "no status",
        "no message",
        "no protobuf",
        "reset",
    ],
)
def test_the_client_says_what_is_wrong_with_an_answer(short_dir, respond, code, told):
    path = short_dir / "odd.sock"
    answering(path, respond)
    with pytest.raises(RpcError, match=told) as caught:
        info(path, 0.5)
    assert caught.value.code is code


def test_the_client_reads_a_good_answer_and_names_a_missing_socket(short_dir):
    path = short_dir / "good.sock"
    answering(path, respond_with(*trailers(Status.OK), body=GOOD))
    assert info(path).name == "gpu"
    with pytest.raises(RpcError, match="No such file") as caught:
        info(short_dir / "none.sock")
    assert caught.value.code is Status.UNAVAILABLE


def test_the_client_understands_grpcio(short_dir):
    """Another driver of the node may be written with it."""
    from concurrent.futures import ThreadPoolExecutor

    path = short_dir / "grpcio.sock"
    handler = grpc.unary_unary_rpc_method_handler(
        lambda _request, _context: registration_pb2.PluginInfo(name="gpu", endpoint="x" * 200_000),
        registration_pb2.InfoRequest.FromString,
        registration_pb2.PluginInfo.SerializeToString,
    )
    server = grpc.server(
        ThreadPoolExecutor(2), handlers=[grpc.method_handlers_generic_handler("a.B", {"C": handler})]
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        assert len(info(path).endpoint) == 200_000
    finally:
        server.stop(0).wait()
