"""How long a response may take, and how much memory."""

from __future__ import annotations

import gzip
import json
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from urllib3.connection import HTTPConnection

from dra_driver.errors import ApiUnavailableError
from dra_driver.kube import decoding, transport
from dra_driver.kube.api_errors import ResponseTooLargeError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.decoding import MAX_BYTES, MAX_MEMORY, TooLargeError, decode, memory_of
from dra_driver.kube.endpoint import Endpoint, load_endpoint
from tests.kube.support import raw_server

NODES = "/api/v1/nodes"
_MIB = 1 << 20


def _client(port: int) -> ApiClient:
    return ApiClient(Endpoint(server=f"http://127.0.0.1:{port}"))


def _dripping(data: bytes, pause_s: float = 0.1):
    """Send a byte now and then. At its end, a client without a limit would see a broken connection."""

    def answer(send, _request):
        for byte in data:
            send(bytes([byte]))
            time.sleep(pause_s)

    return answer


def _sends(*pieces: bytes):
    return lambda send, _request: [send(piece) for piece in pieces]


def _no_answer_in_time():
    return pytest.raises(ApiUnavailableError, match="the API server did not answer in time")


# --- time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 500, id="head"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, id="interim responses"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_head_that_drips_ends_with_the_time_of_the_request(response: bytes, method: str) -> None:
    with raw_server(_dripping(response)) as port, closing(_client(port)) as client, _no_answer_in_time():
        client.request(method, NODES, action="list nodes", body={}, timeout_s=0.5)


def test_response_of_a_proxy_that_drips_ends_with_the_time_of_the_request(tmp_path) -> None:
    with raw_server(_dripping(b"HTTP/1.1 200 " + b"a" * 500)) as port:
        cluster = {"server": "https://api.test", "proxy-url": f"http://127.0.0.1:{port}"}
        path = tmp_path / "kubeconfig"
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        document = {"clusters": [{"name": "c", "cluster": cluster}], "contexts": [context], "users": []}
        path.write_text(json.dumps(document | {"current-context": "x"}))
        with closing(ApiClient(load_endpoint(path))) as client:
            client.open()
            with _no_answer_in_time():
                client.request("POST", NODES, action="list nodes", body={}, timeout_s=0.5)


def test_tls_behind_a_proxy_gets_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    left: list[float | None] = []

    def connected(connection) -> socket.socket:
        ours, connection.other = socket.socketpair()
        now[0] += 1.0
        return ours

    def opened(_connection) -> None:
        now[0] += 2.5

    def handshake(*, sock: socket.socket, **_: object) -> None:
        left.append(sock.gettimeout())
        raise ConnectionAbortedError

    monkeypatch.setattr(HTTPConnection, "_new_conn", connected)
    monkeypatch.setattr(HTTPConnection, "_tunnel", opened)
    monkeypatch.setattr("urllib3.connection._ssl_wrap_socket_and_match_hostname", handshake)
    limit = transport._Until(110.0).clone()
    connection = transport._TlsConnection("proxy.test", 443, timeout=4.0)
    connection.set_tunnel("api.test", 443, scheme="http")
    with pytest.raises(ConnectionAbortedError):
        connection.connect()
    assert (left, limit.read_timeout, limit.connect_timeout) == ([0.5], 6.5, transport.CONNECT_TIMEOUT_S)
    connection.other.close()
    connection.close()


def test_watch_whose_head_drips_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.kube.client.ATTEMPT_S", 0.3)
    answer = _dripping(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 500)
    with raw_server(answer) as port, closing(_client(port)) as client, _no_answer_in_time():
        client.watch(NODES, action="watch", query={"watch": "true"}, idle_timeout_s=1)


@pytest.mark.parametrize("head", ["HTTP/1.0 200 OK", "HTTP/1.1 200 OK\r\nConnection: close"])
def test_event_arrives_at_once_when_the_watch_is_not_chunked(head: str) -> None:
    """As behind a proxy that speaks HTTP/1.0. The pause is longer than an attempt, but not than the idle time."""

    def answer(send, _request):
        send(f"{head}\r\n\r\n".encode())
        send(b'{"type": "ADDED", "object": {}}\n{"type": "MODI')
        time.sleep(0.4)
        send(b'FIED", "object": {}}\n')
        time.sleep(30)

    with raw_server(answer) as port, closing(_client(port)) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dra_driver.kube.client.ATTEMPT_S", 0.2)
            stream = client.watch(NODES, action="watch", query={"watch": "true"}, idle_timeout_s=20)
        events = iter(stream)
        assert [next(events)["type"], next(events)["type"]] == ["ADDED", "MODIFIED"]
        stream.close()
        assert list(events) == []


# --- size -------------------------------------------------------------------------------------------


def _with_head(body: bytes, *more: str, status: int = 200) -> bytes:
    head = [f"HTTP/1.1 {status} Something", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*head, "\r\n"]).encode() + body


def test_compressed_response_is_refused_because_its_size_is_unknown() -> None:
    body = gzip.compress(b"[" + b" " * (50 * _MIB) + b"]")
    with (
        raw_server(_sends(_with_head(body, "Content-Encoding: gzip"))) as port,
        closing(_client(port)) as client,
    ):
        for call in (
            lambda: client.request("GET", NODES, action="list nodes"),
            lambda: client.watch(NODES, action="list nodes", query={"watch": "true"}, idle_timeout_s=1),
        ):
            with pytest.raises(
                ApiUnavailableError, match=r"nodes: the response is compressed \(gzip\), although"
            ):
                call()


def test_compressed_error_keeps_its_status() -> None:
    body = gzip.compress(b"{}")
    answer = _sends(_with_head(body, "Content-Encoding: gzip", status=503))
    with (
        raw_server(answer) as port,
        closing(_client(port)) as client,
        pytest.raises(ApiUnavailableError) as caught,
    ):
        client.request("GET", NODES, action="list nodes")
    assert str(caught.value) == "cannot list nodes: Something (HTTP 503)"


_MANY = {
    "objects": b'{"a":{}},',
    "lists": b"[[1]],",
    "numbers": b"1000,",
    "letters": '"üa",'.encode(),
    "escaped": b'"\\ud83d\\ude00a",',
    "halves": b'"\\ud83da",',
}


def _document(part: bytes, size: int) -> bytes:
    return b'{"items":[' + part * (size // len(part)) + b"0]}\n"


@pytest.mark.parametrize("part", _MANY)
def test_response_of_many_small_objects_stays_within_its_memory(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest one that is accepted, and a larger one that is refused before it takes the memory."""
    limit = MAX_MEMORY // 4  # measuring is slow
    monkeypatch.setattr(decoding, "MAX_MEMORY", limit)
    fits = limit * _MIB // memory_of(_document(_MANY[part], _MIB))
    for size, is_refused in ((int(0.98 * fits), False), (int(1.02 * fits), True)):
        sent = _document(_MANY[part], size)
        with (
            raw_server(_sends(_with_head(sent))) as port,
            closing(_client(port)) as client,
            _peak_within(limit),
        ):
            try:
                client.request("GET", NODES, action="list nodes", timeout_s=100)
            except ResponseTooLargeError:
                assert is_refused
            else:
                assert not is_refused


def test_event_of_many_small_objects_stays_within_its_memory() -> None:
    sent = _document(b"{},", MAX_BYTES - 1000)
    with (
        raw_server(_sends(_with_head(sent))) as port,
        closing(_client(port)) as client,
        _peak_within(MAX_MEMORY),
    ):
        stream = client.watch(NODES, action="list nodes", query={"watch": "true"}, idle_timeout_s=100)
        with pytest.raises(ResponseTooLargeError, match="nodes: the response has"):
            next(iter(stream))


@contextmanager
def _peak_within(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= limit
    finally:
        tracemalloc.stop()


def test_typical_objects_are_accepted() -> None:
    """The slices of a machine with 500 devices that have all the attributes and capacities that are allowed."""
    attributes = {f"attribute{n}": {"string": f"value-{n}-{'x' * 20}"} for n in range(16)}
    capacity = {f"capacity{n}": {"value": "80Gi"} for n in range(16)}
    counters = [{"counterSet": "gpu-0", "counters": capacity}]
    device = {"name": "gpu-0", "attributes": attributes, "capacity": capacity, "consumesCounters": counters}
    data = json.dumps({"items": [{"spec": {"devices": [device] * 500}}]}).encode()
    assert memory_of(data) < MAX_MEMORY * 0.75
    assert decode(data)["items"]
    assert len(data) < MAX_BYTES


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rb'"x\ud800y"', "x?y"),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\ud83d\ud83d\ude00"', "?\U0001f600"),
        (rb'"\ude00\ud83d"', "??"),
        (rb'"\\ud800"', r"\ud800"),
        (rb'"\\\ud800"', "\\?"),
    ],
)
def test_half_of_a_pair_of_surrogates_becomes_a_question_mark(text: bytes, value: str) -> None:
    assert decode(text) == value
    decode(text).encode()


def test_refusal_says_how_large_the_response_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_MEMORY", 1 << 20)
    with pytest.raises(TooLargeError) as caught:
        decode(b'{"items":[' + b"{}," * 100_000 + b"{}]}")
    assert str(caught.value) == (
        "the response has 0.3 MiB and would take 11 MiB of memory; the limit is 1 MiB"
    )
