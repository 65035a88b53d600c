"""Transport: error mapping, timeouts, retries, tokens, limits, and what a request carries."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from playground.apiserver import PlaygroundApiServer

import dra_driver
from dra_driver.base.backoff import TokenBucket
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import PathNotFoundError, WatchExpiredError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import JSON, MERGE_PATCH, ApiClient, is_not_found
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.slices import SliceCache
from dra_driver.model.claim import ClaimRef
from tests.fakes.tables import tabled

NODES = "/api/v1/nodes"


@pytest.fixture
def client(server, connect):
    return connect(server)


@pytest.mark.parametrize("status", [408, 429, 500, 507])
def test_error_is_retryable_when_server_cannot_answer_now(server, client, status):
    server.faults.fail(1, status)
    with pytest.raises(ApiUnavailableError) as caught:
        client.request("GET", NODES, action="list nodes")
    assert str(caught.value).startswith("cannot list nodes: ")
    assert f"(HTTP {status})" in str(caught.value)
    assert caught.value.retry_after_s is None
    assert caught.value.is_brief
    assert client.request("GET", NODES, action="list nodes")["items"] == []


@tabled("status", "reason")
def test_error_is_permanent_when_server_refuses(server, client, status, reason):
    server.faults.fail(
        2 if status == 401 else 1, status, reason=reason
    )  # with other credentials, it may be taken
    with pytest.raises(ApiRejectedError) as caught:
        client.request("POST", NODES, action="create node", body={})
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert (
        str(caught.value)
        == f"cannot create node: the playground's API server was configured to fail this request (HTTP {status})"
    )
    assert isinstance(caught.value, WatchExpiredError) == (status == 410)
    assert is_not_found(caught.value) == (status == 404)


def test_redirect_is_refused_and_not_followed(server, client):
    server.faults.fail(1, 302)
    with pytest.raises(ApiRejectedError) as caught:
        client.request("GET", NODES, action="list nodes")
    assert caught.value.status == 302
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        (timedelta(seconds=90), 30, 90),
        (timedelta(seconds=-90), 0, 0),
        ("86400", 300, 300),
        ("9" * 400, 300, 300),
        (timedelta(days=3000), 300, 300),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300, 300),
        ("soon", None, None),
    ],
    ids=str,
)
def test_retry_after_is_handed_on_when_server_names_it(server, client, header, low, high):
    """At most five minutes; what cannot be read counts as absent."""
    if isinstance(header, timedelta):
        header = format_datetime(datetime.now(UTC) + header, usegmt=True)
    server.faults.fail(1, 429, retry_after=header)
    with pytest.raises(ApiUnavailableError) as caught:
        client.request("GET", NODES, action="list nodes")
    requested = caught.value.retry_after_s
    assert requested is None if low is None else low <= requested <= high


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({"retryAfterSeconds": 3}, 3),
        ({"retryAfterSeconds": 10**400}, 300),
        ([1], None),
        ({"retryAfterSeconds": -1}, None),
    ],
)
def test_retry_after_comes_from_status_when_header_is_missing(server, client, details, expected):
    server.faults.fail(1, 503, body=json.dumps({"message": "busy", "details": details}).encode())
    with pytest.raises(ApiUnavailableError, match="busy") as caught:
        client.request("GET", NODES, action="list nodes")
    assert caught.value.retry_after_s == expected


@pytest.mark.parametrize("status", [200, 503])
def test_error_is_retryable_when_answer_is_nested_deeper_than_can_be_read(server, client, status):
    server.faults.fail(1, status, body=b'{"a":' * 5000 + b"1" + b"}" * 5000)
    with pytest.raises(ApiUnavailableError, match="cannot list nodes: "):
        client.request("GET", NODES, action="list nodes")


def test_error_text_is_one_line_when_a_proxy_answers_html(server, client):
    server.faults.fail(1, 403, body=b"<html>\n  <b>no\n\nentry</b>" + b"x" * 2000)
    with pytest.raises(ApiRejectedError) as caught:
        client.request("GET", NODES, action="list nodes")
    assert "\n" not in str(caught.value)
    said = "cannot list nodes: the response is a web page, so it is not from the API server: no entry x"
    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) < 200


def test_a_server_does_not_move_the_cursor_of_who_reads_what_it_says(server, client):
    server.faults.fail(1, 403, body=json.dumps({"message": "no\x1b[2J \u202eentry"}).encode())
    with pytest.raises(ApiRejectedError) as caught:
        client.request("GET", NODES, action="list nodes")
    assert str(caught.value) == "cannot list nodes: no?[2J ?entry (HTTP 403)"


def test_error_is_retryable_when_answer_is_not_json(server, client):
    page = b"\n<!DOCTYPE html><html><style>b {color: red}</style><title>Log in</title><b>Single sign-on</b></html>"
    server.faults.fail(1, 200, body=page)
    with pytest.raises(ApiUnavailableError) as caught:
        client.request("GET", NODES, action="list nodes")
    assert str(caught.value) == (
        "cannot list nodes: the response is a web page, so it is not from the API server: Log in Single sign-on; "
        "check the server of the kubeconfig and the proxy in front of it"
    )
    server.faults.fail(1, 200, body=b"pong")
    with pytest.raises(
        ApiUnavailableError, match=r"cannot list nodes: the response begins with 'pong' and is not JSON"
    ):
        client.request("GET", NODES, action="list nodes")


def test_error_is_retryable_when_connection_is_refused(server, client):
    server.stop()
    with pytest.raises(
        ApiUnavailableError, match="cannot list nodes: cannot connect to the API server: "
    ) as caught:
        client.request("GET", NODES, action="list nodes")
    assert "object at 0x" not in str(caught.value)
    assert caught.value.is_brief, "a server that starts is worth another try"


def test_error_is_retryable_when_connection_is_dropped(server, client):
    server.faults.down = True
    with pytest.raises(ApiUnavailableError, match="connection to the API server broke"):
        client.request("POST", NODES, action="create node", body={})
    assert len(server.requests) == 1, "a write must not be sent twice"
    server.faults.down = False
    assert client.request("GET", NODES, action="list nodes")["items"] == []


def test_error_is_retryable_when_server_is_slow(server, client):
    server.faults.slow("/nodes", 5)
    with pytest.raises(ApiUnavailableError, match="did not answer in time"):
        client.request("GET", NODES, action="list nodes", timeout_s=0.1)


def test_answer_of_endless_size_is_refused(server, client, monkeypatch):
    """A 400 MB response used to increase the daemon to 1.2 GiB."""
    for module in ("client", "transport"):
        monkeypatch.setattr(f"dra_driver.kube.{module}.MAX_BYTES", 1 << 20)
    for status in (200, 500):
        server.faults.fail(1, status, body=b"[" + b" " * (2 << 20) + b"]")
        with pytest.raises(ApiUnavailableError, match="cannot list nodes: the response is larger than 1 MiB"):
            client.request("GET", NODES, action="list nodes")
    server.add("nodes", {"metadata": {"name": "n", "annotations": {"a": "x" * (2 << 20)}}})
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=60)
    with pytest.raises(ApiUnavailableError, match="watch nodes: an event is larger than 1 MiB"):
        next(iter(stream))


def test_own_limit_counts_against_the_time_of_a_request(server):
    client = ApiClient(Endpoint(server=server.url), limiter=TokenBucket(0.1, 1))
    client.request("GET", NODES, action="list nodes")
    with pytest.raises(
        ApiUnavailableError,
        match=r"cannot list nodes: gpu-dra-driver reached its own limit of API requests, kubeAPIQPS=0.1; raise it",
    ):
        client.request("GET", NODES, action="list nodes", timeout_s=0.5)
    client.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_request_works_when_idle_connection_was_closed(server, client, method):
    client.request("GET", NODES, action="list nodes")
    server.stop()
    server.start()
    body = None if method == "GET" else {"metadata": {"name": "n"}}
    assert client.request(method, NODES, action="nodes", body=body)["apiVersion"] == "v1"


LOSSES = [
    pytest.param(lambda server: server.faults.silence_connections(), id="acknowledged"),
    pytest.param(
        PlaygroundApiServer.vanish,
        id="vanished",
        marks=[pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a packet filter needs root")],
    ),
]


@pytest.fixture
def loses(server, client, monkeypatch):
    """A server that loses four pooled connections without a word, as the one does whose address another one takes over,
    after which each attempt counts."""
    monkeypatch.setattr("dra_driver.kube.client.ATTEMPT_S", 0.3)
    monkeypatch.setattr("dra_driver.kube.transport.UNACKNOWLEDGED_S", 0.3)
    server.add("nodes", {"metadata": {"name": "n"}})

    def lose(how):
        server.faults.slow("/nodes", 0.05)  # so that no connection serves two of these
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.request("GET", NODES, action="list nodes"), range(4)))
        server.faults.clear()
        how(server)
        del server.requests[:]

    return lose


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
def test_request_is_repeated_on_a_fresh_connection_when_server_vanishes(
    server, client, loses, monkeypatch, how, method
):
    """Once for all connections of the pool, and within the time of the request."""
    body = {"metadata": {"name": "n", "labels": {"a": "b"}}}
    loses(how)
    client.request(
        method,
        f"{NODES}/n",
        action=method,
        body=None if method == "GET" else body if method != "DELETE" else {},
        content_type=MERGE_PATCH if method == "PATCH" else JSON,
        timeout_s=60,
    )
    monkeypatch.setattr("dra_driver.kube.client.ATTEMPT_S", 60.0)
    client.request("GET", NODES, action="list nodes", timeout_s=60)
    assert [request.method for request in server.requests] == [method, "GET"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a packet filter needs root")
def test_post_ends_unrepeated_as_soon_as_nothing_is_acknowledged_when_server_vanishes(server, client, loses):
    """It may have arrived: the caller checks, and its next attempt uses a new connection."""
    loses(PlaygroundApiServer.vanish)
    node = {"metadata": {"name": "m"}}
    start = time.monotonic()
    with pytest.raises(ApiUnavailableError, match="the API server did not answer in time"):
        client.request("POST", NODES, action="create node", body=node, timeout_s=60)
    assert time.monotonic() - start < 30
    assert not server.requests
    client.request("POST", NODES, action="create node", body=node, timeout_s=60)
    with pytest.raises(ApiRejectedError) as refused:
        client.request("POST", NODES, action="create node", body=node)
    assert refused.value.status == 409


def test_slow_answer_is_waited_for_when_the_first_attempt_took_too_long(server, client, monkeypatch):
    """The second attempt gets all the remaining time; otherwise responses slower than one attempt would never
    arrive.
    """
    monkeypatch.setattr("dra_driver.kube.client.ATTEMPT_S", 0.1)
    server.faults.slow("/nodes", 0.5)
    assert client.request("GET", NODES, action="list nodes", timeout_s=60)["items"] == []
    client.request("POST", NODES, action="create node", body={"metadata": {"name": "n"}}, timeout_s=60)
    assert [request.method for request in server.requests if request.method == "POST"] == ["POST"]


def test_connection_that_is_not_taken_is_worth_another_try(monkeypatch):
    """As while another server takes over the address of one that vanished."""
    monkeypatch.setattr("dra_driver.kube.transport.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as full:
        for _ in range(2):
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        client = ApiClient(Endpoint(server=f"http://127.0.0.1:{listener.getsockname()[1]}"))
        with pytest.raises(
            ApiUnavailableError, match="cannot list nodes: the API server did not answer in time"
        ) as caught:
            client.request("GET", NODES, action="list nodes")
        assert caught.value.is_brief
        client.close()


def test_unknown_path_is_reported_from_unknown_object(server, client):
    with pytest.raises(PathNotFoundError):
        client.request("GET", "/apis/resource.k8s.io/v9/resourceslices", action="list")
    with pytest.raises(ApiRejectedError) as caught:
        client.request("GET", f"{NODES}/absent", action="get node")
    assert not isinstance(caught.value, PathNotFoundError)
    server.faults.fail(1, 404, body=b"404 page not found\n")
    with pytest.raises(PathNotFoundError, match="404 page not found"):
        client.request("GET", NODES, action="list nodes")


def test_request_carries_user_agent(server, client):
    client.request("GET", NODES, action="list nodes", query={"labelSelector": "a=b"})
    request = server.requests[-1]
    assert request.user_agent == f"gpu-dra-driver/{dra_driver.__version__}"
    assert request.query == {"labelSelector": "a=b"}


def test_watch_fails_like_a_request_when_it_cannot_start(server, client):
    server.faults.fail(1, 503)
    with pytest.raises(ApiUnavailableError, match="HTTP 503"):
        client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=1)


def test_watch_breaks_when_server_cuts_it(server, client):
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=5)
    server.faults.cut_watches()
    with pytest.raises(ApiUnavailableError, match="watch nodes: connection to the API server broke"):
        list(stream)


def test_watch_breaks_when_server_is_silent(server, client):
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=0.1)
    with pytest.raises(ApiUnavailableError, match="did not answer in time"):
        list(stream)


@pytest.mark.parametrize("how", LOSSES)
def test_watch_opens_on_a_fresh_connection_when_server_vanishes(server, client, loses, how):
    """Not only after the time for which an open watch may be silent; that is long, and still that of the new one."""
    loses(how)
    began = time.monotonic()
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=60)
    assert time.monotonic() - began < 30
    time.sleep(0.6)  # twice as long as an attempt
    server.add("nodes", {"metadata": {"name": "m"}})
    assert [next(events)["object"]["metadata"]["name"] for events in [iter(stream)] * 2] == ["n", "m"]
    stream.close()


def test_watch_closed_before_reading_is_empty(server, client):
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=5)
    stream.close()
    assert list(stream) == []


def test_long_events_arrive_whole(server, client):
    stream = client.watch(
        NODES, action="watch", query={"watch": "true", "resourceVersion": "1"}, idle_timeout_s=5
    )
    server.add("nodes", {"metadata": {"name": "n", "annotations": {"a": "ü" * 200_000}}})
    event = next(iter(stream))
    assert event["object"]["metadata"]["annotations"]["a"] == "ü" * 200_000
    stream.close()


def test_every_request_is_observed_with_its_answer(server, connect):
    seen = []
    client = connect(server, observe=lambda *what: seen.append(what))
    client.request("GET", NODES, action="list nodes")
    server.faults.fail(1, 409, reason="Conflict")
    with pytest.raises(ApiRejectedError):
        client.request("POST", NODES, action="create node", body={})
    assert seen == [("GET", 200), ("POST", 409)]
    server.stop()
    with pytest.raises(ApiUnavailableError):
        client.request("DELETE", f"{NODES}/n", action="delete node")
    assert seen[2:] == [("DELETE", None)]


@pytest.mark.parametrize("served", [(), ("v1beta1", "v1beta2")])
def test_error_names_kubernetes_versions_when_v1_is_not_served(connect, served):
    """A claim is not taken for deleted either: else every claim of the node would be."""
    with PlaygroundApiServer(served=served) as server:
        client = connect(server)
        asks = [
            client.check_group,
            lambda: SliceCache(client, "gpu.nvidia.com", "n").open_watch("1"),
            lambda: ClaimClient(client).current(ClaimRef("default", "absent", "uid-1")),
        ]
        for ask in asks:
            with pytest.raises(PathNotFoundError, match=r"resource\.k8s\.io/v1.*Kubernetes 1\.34 or later"):
                ask()
        assert len(server.requests) == len(asks)


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_impossible_name_never_reaches_the_server(server, client, name):
    with pytest.raises(ApiRejectedError, match="cannot be the name of an API object"):
        ClaimClient(client).find(ClaimRef("default", name, "uid-1"))
    assert server.requests == []


def test_name_stays_one_path_segment(server, client):
    assert ClaimClient(client).find(ClaimRef("default", "a/../../b?x=y#z", "uid-1")) is None
    assert server.requests[-1].query == {}
