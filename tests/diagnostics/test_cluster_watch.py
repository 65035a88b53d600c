"""The loop of `cluster --watch`: how often it lists and watches while its API server ends each watch at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.diagnostics.cluster_lists import ClusterReader
from dra_driver.diagnostics.cluster_watch import ClusterWatch
from dra_driver.kube.endpoint import load_endpoint
from tests.kube.support import AN_END_OF_EACH_WATCH, DRIVER, Patience, bookmark, busy


@pytest.fixture
def server() -> Iterator[PlaygroundApiServer]:
    with PlaygroundApiServer() as server:
        yield server


def waits_of_an_hour(server: PlaygroundApiServer, directory: Path, told: list[str]) -> list[float]:
    """The waits of the thread for claims, in seconds."""
    server.write_kubeconfig(directory / "kubeconfig")
    endpoint = load_endpoint(directory / "kubeconfig")
    reader = ClusterReader(endpoint, DRIVER, timeout_s=10, with_owners=False)
    watching = ClusterWatch(reader, told.append, poll_s=30.0)
    watching._stop = stop = Patience(3600)
    [claims] = [listed for listed in reader.needed if listed.name == "resourceclaims"]
    watching._run(claims)
    assert sum(stop.waits) >= 3600, "ended by the waits"
    return stop.waits


@pytest.mark.parametrize("end", AN_END_OF_EACH_WATCH.values(), ids=AN_END_OF_EACH_WATCH)
def test_lists_and_watches_become_rare_when_each_watch_ends_at_once(server, tmp_path, end):
    end(server.faults)
    told: list[str] = []
    waits = waits_of_an_hour(server, tmp_path, told)
    steps = chain([1.0, 2.0, 4.0, 8.0, 16.0], repeat(30.0))
    assert all(0.8 * step <= wait <= 1.2 * step for wait, step in zip(waits, steps, strict=False))
    asked = [one for one in server.requests if one.path.endswith("/resourceclaims")]
    assert len(asked) <= 2 * len(waits), "a list and a watch before each wait"
    assert told == []


@pytest.mark.parametrize(("code", "asked_s", "least_s"), [(429, 40, 40), (503, 40, 40), (429, 10**9, 300)])
def test_next_watch_waits_as_long_as_asked_when_an_event_says_so(server, tmp_path, code, asked_s, least_s):
    server.faults.end_watches(bookmark("1000000"), busy(code, asked_s))
    waits = waits_of_an_hour(server, tmp_path, [])
    assert all(least_s <= wait <= 1.2 * least_s for wait in waits)
