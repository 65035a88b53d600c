"""The labels of the own node, from a watch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiUnavailableError
from dra_driver.kube import watch
from dra_driver.kube.watch import NodeLabels
from tests.fakes.waiting import eventually


def label(server: PlaygroundApiServer, node: str, **labels: str) -> None:
    resource = server.resource("nodes", group="")
    [found] = [one for one in server.objects("nodes", group="") if one["metadata"]["name"] == node]
    found["metadata"]["labels"] = labels
    server.operations.update(resource, ("", node), found)


@pytest.fixture
def reported() -> list[Mapping[str, str] | None]:
    return []


@pytest.fixture
def labels(server, connect, reported) -> Iterator[NodeLabels]:
    for name in ("n", "other"):
        server.add("nodes", {"metadata": {"name": name, "labels": {"a": "1"}}})
    labels = NodeLabels(connect(server), "n", lambda: reported.append(labels.now()), backoff_s=(0.01, 0.05))
    yield labels
    labels.stop()


def test_labels_are_reported_once_for_each_change_of_the_own_node(server, labels, reported):
    assert labels.now() is None
    labels.start()
    eventually(lambda: labels.now() == {"a": "1"})
    label(server, "other", a="2")
    label(server, "n", a="1")
    label(server, "n", a="3")
    eventually(lambda: {"a": "3"} in reported)
    assert reported == [{"a": "1"}, {"a": "3"}]
    server.operations.delete(server.resource("nodes", group=""), ("", "n"), {})
    eventually(lambda: labels.now() is None)
    [request, *_] = [one for one in server.requests if one.path == "/api/v1/nodes"]
    assert request.query == {"fieldSelector": "metadata.name=n"}


def test_labels_are_unknown_when_list_and_watch_are_refused(server, labels, monkeypatch):
    server.faults.fail(10_000, 403, reason="Forbidden", path="/api/v1/nodes")
    labels.start()
    eventually(lambda: labels.failing)
    with pytest.raises(ApiUnavailableError, match="cannot list node n: "):
        labels.now()
    server.faults.clear()
    eventually(lambda: labels.failing is None)
    assert labels.now() == {"a": "1"}
    server.stop()
    eventually(lambda: labels.failing)
    assert labels.now() == {"a": "1"}, "for a while"
    monkeypatch.setattr(watch, "_TRUSTED_S", 0.0)
    with pytest.raises(ApiUnavailableError):
        labels.now()


def test_labels_are_known_from_each_list_without_the_right_to_watch(server, labels):
    server.faults.fail(10_000, 403, reason="Forbidden", path="watch=true")
    labels.start()
    eventually(lambda: labels.failing)
    labels.failing = (-math.inf, "it has failed for long")
    label(server, "n", a="2")
    eventually(lambda: labels.now() == {"a": "2"})
    assert labels.failing
