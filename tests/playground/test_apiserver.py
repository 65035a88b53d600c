"""The playground's API server, spoken to with plain HTTP: the semantics that tests and the demo rely on."""

from __future__ import annotations

import contextlib
import http.client
import json

import pytest
from playground.apiserver import PlaygroundApiServer

from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
NODES = "/api/v1/nodes"


@pytest.fixture
def server():
    with PlaygroundApiServer() as server:
        yield server


def call(server, method, path, body=None, content_type="application/json"):
    """(status, decoded body)"""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": content_type})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    return response.status, json.loads(text) if response.headers[
        "Content-Type"
    ] == "application/json" else text


def watch(server, path, count):
    """The first `count` events of a watch."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        with connection.getresponse() as response:
            return [json.loads(response.readline()) for _ in range(count)]


def a_slice(name="s", node="n", **spec):
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name},
        "spec": {"driver": "d.example.com", "nodeName": node, "pool": pool, **spec},
    }


def test_a_list_in_pages_ends_when_something_has_changed(server):
    for number in range(5):
        call(server, "POST", NODES, {"metadata": {"name": f"n{number}"}})
    _, first = call(server, "GET", f"{NODES}?limit=2")
    assert [item["metadata"]["name"] for item in first["items"]] == ["n0", "n1"]
    assert first["metadata"]["remainingItemCount"] == 3
    _, second = call(server, "GET", f"{NODES}?limit=4&continue={first['metadata']['continue']}")
    assert [item["metadata"]["name"] for item in second["items"]] == ["n2", "n3", "n4"]
    assert "continue" not in second["metadata"]
    call(server, "DELETE", f"{NODES}/n0")
    status, refused = call(server, "GET", f"{NODES}?limit=2&continue={first['metadata']['continue']}")
    assert (status, refused["reason"]) == (410, "Expired")


def a_claim(name="c", **exactly):
    request = {"name": "r", "exactly": {"deviceClassName": "gpu", **exactly}}
    return {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}}


def test_create_needs_a_new_name_a_namespace_and_json(server):
    assert call(server, "POST", SLICES, a_slice("s"))[0] == 201
    assert call(server, "POST", SLICES, a_slice("s"))[1]["reason"] == "AlreadyExists"
    assert call(server, "POST", SLICES, a_slice() | {"metadata": {}})[0] == 422
    assert call(server, "POST", CLAIMS.replace("default", "absent"), a_claim())[0] == 404
    assert (
        call(server, "POST", CLAIMS, a_claim() | {"metadata": {"name": "c", "namespace": "other"}})[0] == 400
    )
    assert call(server, "POST", SLICES, [])[0] == 400
    assert call(server, "POST", SLICES, a_slice() | {"kind": "Pod"})[0] == 400
    assert call(server, "POST", f"{SLICES}/s", a_slice())[0] == 405


@pytest.mark.parametrize(
    "spec", [{"devices": [1]}, {"devices": {"a": 1}}, {"pool": "p"}, {"sharedCounters": [None]}]
)
def test_wrong_types_are_refused_and_not_stored(server, spec):
    body = a_slice()
    body["spec"] |= spec
    status, answer = call(server, "POST", SLICES, body)
    assert (status, answer["reason"]) == (400, "BadRequest")
    assert server.objects("resourceslices") == []


@tabled("query", "names")
def test_selectors_select(server, query, names):
    first = a_slice("a", "n1")
    first["metadata"]["labels"] = {"x": "1"}
    call(server, "POST", SLICES, first)
    call(server, "POST", SLICES, a_slice("b", "n2"))
    assert [i["metadata"]["name"] for i in call(server, "GET", f"{SLICES}?{query}")[1]["items"]] == names


def test_unknown_field_selector_is_refused(server):
    status, body = call(server, "GET", f"{SLICES}?fieldSelector=spec.color=red")
    assert (status, body["message"]) == (400, 'field label not supported: "spec.color"')


def test_status_and_spec_are_written_apart(server):
    claim = call(server, "POST", CLAIMS, a_claim() | {"status": {"reservedFor": [{"uid": "x"}]}})[1]
    assert "status" not in claim
    claim["status"] = {"allocation": {"devices": {}}}
    claim["metadata"]["labels"] = {"a": "b"}
    by_main = call(server, "PUT", f"{CLAIMS}/c", claim)[1]
    assert "status" not in by_main
    assert by_main["metadata"]["labels"] == {"a": "b"}
    claim["metadata"] = {"name": "c", "labels": {"a": "c"}}
    by_status = call(server, "PUT", f"{CLAIMS}/c/status", claim)[1]
    assert by_status["status"] == {"allocation": {"devices": {}}}
    assert by_status["metadata"]["labels"] == {"a": "b"}
    assert call(server, "GET", f"{CLAIMS}/c/status")[1] == by_status


def test_watch_reports_when_an_object_enters_or_leaves_the_selection(server):
    start = server.store.version
    node = call(server, "POST", NODES, {"metadata": {"name": "n"}})[1]
    node["metadata"]["labels"] = {"x": "1"}
    node = call(server, "PUT", f"{NODES}/n", node)[1]
    node["metadata"]["labels"] = {"x": "1", "y": "2"}
    node = call(server, "PUT", f"{NODES}/n", node)[1]
    node["metadata"]["labels"] = {}
    call(server, "PUT", f"{NODES}/n", node)
    path = f"{NODES}?watch=true&resourceVersion={start}&labelSelector=x"
    assert [event["type"] for event in watch(server, path, 3)] == ["ADDED", "MODIFIED", "DELETED"]


def test_history_is_bounded():
    with PlaygroundApiServer(history=3) as server:
        start = server.store.version
        for number in range(5):
            server.add("nodes", {"metadata": {"name": f"n{number}"}})
        event = watch(server, f"{NODES}?watch=true&resourceVersion={start}", 1)[0]
        assert (event["type"], event["object"]["code"], event["object"]["reason"]) == (
            "ERROR",
            410,
            "Expired",
        )
        recent = watch(server, f"{NODES}?watch=true&resourceVersion={start + 2}", 3)
        assert [e["object"]["metadata"]["name"] for e in recent] == ["n2", "n3", "n4"]
