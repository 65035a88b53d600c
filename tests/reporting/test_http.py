from __future__ import annotations

import errno
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import structlog

from dra_driver.errors import FatalError, InvalidConfigError
from dra_driver.model.ids import split_address
from dra_driver.reporting.http import HttpEndpoint, Page, Response, problems_page
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually


def broken() -> Response:
    raise ValueError("oops")


@pytest.fixture(scope="module")
def problems() -> list[str]:
    return []


@contextmanager
def serving(pages: dict[str, Page], address: str = "127.0.0.1:0") -> Iterator[HttpEndpoint]:
    made = HttpEndpoint(address, pages)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def endpoint(problems: list[str]) -> Iterator[HttpEndpoint]:
    pages = {
        "/readyz": problems_page(lambda: problems),
        "/metrics": lambda: Response(200, "text/x", b"a 1\n"),
        "/broken": broken,
    }
    with serving(pages) as made:
        yield made


def get(
    endpoint: HttpEndpoint, path: str, method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=PATIENCE_S)
    connection.request(method, path)
    answer = connection.getresponse()
    result = answer.status, answer.getheader("Content-Type"), answer.read()
    connection.close()
    return result


def test_page_is_served_with_its_type_whatever_the_query(endpoint: HttpEndpoint) -> None:
    assert get(endpoint, "/metrics") == get(endpoint, "/metrics?x=1") == (200, "text/x", b"a 1\n")


def test_problems_are_reported_line_by_line_until_they_are_gone(
    endpoint: HttpEndpoint, problems: list[str]
) -> None:
    text = "text/plain; charset=utf-8"
    assert get(endpoint, "/readyz") == (200, text, b"ok\n")
    problems += ["no driver", "no kubelet"]
    assert get(endpoint, "/readyz") == (503, text, b"no driver\nno kubelet\n")
    problems.clear()


def test_other_paths_and_methods_are_refused(endpoint: HttpEndpoint) -> None:
    assert get(endpoint, "/../etc/passwd")[0] == 404
    assert get(endpoint, "/metrics", "POST")[0] == 405


def test_page_that_fails_is_reported_in_the_log_and_not_in_the_answer(endpoint: HttpEndpoint) -> None:
    with structlog.testing.capture_logs() as lines:
        status, _, body = get(endpoint, "/broken")
    assert (status, body) == (500, b"internal error; see the log of gpu-dra-driver\n")
    assert [(line["event"], line["path"], line["exc_info"]) for line in lines] == [
        ("page_failed", "/broken", True)
    ]
    assert get(endpoint, "/metrics")[0] == 200


def test_client_that_hangs_up_leaves_no_traceback(
    endpoint: HttpEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    with structlog.testing.capture_logs() as lines:
        endpoint._server.handle_error(None, ("10.0.0.9", 4711))
    assert [line["event"] for line in lines] == ["http_client_lost"]
    assert capfd.readouterr().err == ""


def test_client_that_does_not_read_is_cut_off_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dra_driver.reporting.http._Handler.timeout", 0.1)
    one = HttpEndpoint("127.0.0.1:0", {"/big": lambda: Response(200, "text/x", b"x" * (64 << 20))})
    with ExitStack() as ends:
        ends.callback(one.stop)
        client = ends.enter_context(socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE_S))
        client.sendall(b"GET /big HTTP/1.0\r\n\r\n")  # before the start: a late request is cut off, too
        before = threading.active_count()
        one.start()
        assert client.recv(1) == b"H"
        eventually(lambda: threading.active_count() <= before + 1)
    assert capfd.readouterr().err == ""


def test_clients_that_stay_without_a_word_cost_a_bounded_number_of_threads_and_lock_no_one_out(
    endpoint: HttpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.reporting.http._MAX_CONNECTIONS", 4)
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S) for _ in range(12)]
    assert [one.recv(1) for one in silent[:8]] == [b""] * 8, "the oldest are cut off"
    assert get(endpoint, "/metrics")[0] == 200
    eventually(lambda: threading.active_count() <= before + 4)
    for one in silent:
        one.close()


def test_page_that_hangs_takes_a_bounded_number_of_threads_and_blocks_no_other_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that serves a page does not end when the client disconnects, or when its connection is closed."""
    monkeypatch.setattr("dra_driver.reporting.http._MAX_CONNECTIONS", 4)
    monkeypatch.setattr("dra_driver.reporting.http._MAX_AT_ONE_PAGE", 8)
    let, begun = threading.Event(), threading.Semaphore(0)

    def slow() -> Response:
        begun.release()
        assert let.wait(PATIENCE_S)
        return Response(200, "text/x", b"late\n")

    pages = {"/slow": slow, "/fast": lambda: Response(200, "text/x", b"now\n")}
    with serving(pages) as one, ExitStack() as callers:
        callers.callback(let.set)
        before = threading.active_count()
        for _ in range(8):
            caller = socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE_S)
            callers.enter_context(caller).sendall(b"GET /slow HTTP/1.0\r\n\r\n")
            assert begun.acquire(timeout=PATIENCE_S)
        answers = [get(one, "/slow") for _ in range(12)]
        busy = (503, "text/plain; charset=utf-8", b"too many requests for this page are still in progress\n")
        assert answers == [busy] * 12
        assert get(one, "/fast")[0] == 200
        eventually(lambda: threading.active_count() - before <= 8 + 4)
        let.set()
        eventually(lambda: threading.active_count() <= before)
        assert get(one, "/slow")[0] == 200


def test_start_does_not_wait_for_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    def requested(*_: object) -> str:
        raise AssertionError("DNS was asked")

    monkeypatch.setattr(socket, "getfqdn", requested)
    with serving({}) as one:
        assert one.port


@tabled("address", "hosts")
def test_kubelet_is_answered_over_the_family_of_the_pods_address(address: str, hosts: list[str]) -> None:
    """On a cluster with IPv6 only, a probe of an endpoint that listens on IPv4 fails for ever."""
    with serving({"/": lambda: Response(200, "text/x", b"ok\n")}, address) as one:
        assert [get(one, "/", host=host)[2] for host in hosts] == [b"ok\n"] * len(hosts)


@pytest.mark.parametrize("call", ["__init__", "bind"])
def test_all_addresses_are_those_of_ipv4_where_the_kernel_has_no_ipv6(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A kernel without IPv6 creates no such socket; if only the interfaces lack it, the socket cannot be
    bound.
    """
    real = socket.socket

    class Kernel(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int = -1, *more: Any, **named: Any) -> None:
            if call == "__init__" and family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "no IPv6 here")
            super().__init__(family, *more, **named)

        def bind(self, address: tuple[object, ...]) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "no IPv6 here")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Kernel)
    with serving({"/": lambda: Response(200, "text/x", b"ok\n")}, ":0") as one:
        assert get(one, "/")[2] == b"ok\n"
        with pytest.raises(FatalError, match=r"cannot serve HTTP on \[::1\]:0: no IPv6 here"):
            HttpEndpoint("[::1]:0", {})


def test_port_that_is_taken_is_fatal(endpoint: HttpEndpoint) -> None:
    with pytest.raises(
        FatalError, match=r"cannot serve HTTP on 127\.0\.0\.1:\d+: .*choose another --http-endpoint"
    ):
        HttpEndpoint(f"127.0.0.1:{endpoint.port}", {})


@tabled("text", "expected")
def test_address_is_split(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == tuple(expected)


@tabled("text")
def test_address_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"expected host:port or :port, for example :8080.*brackets"):
        split_address(text)


@pytest.mark.parametrize("address", ["127.0.0.1:0", ":0"])
def test_a_server_at_rest_ends_when_it_is_stopped(address: str) -> None:
    with serving({}, address) as one:
        pass
    one._thread.join(PATIENCE_S)
    assert not one._thread.is_alive()
