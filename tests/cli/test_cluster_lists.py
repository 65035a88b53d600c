"""The lists of `cluster`, against an API server that is too busy for them or forgets them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.cli.cluster_lists import ClusterLists, read_cluster
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint


@pytest.fixture
def server():
    with PlaygroundApiServer() as server:
        yield server


@pytest.fixture
def waits(monkeypatch):
    """How long it waited, each time; the clock goes on by that."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waits), sleep=waits.append)
    monkeypatch.setattr("dra_driver.cli.cluster_lists.time", clock)
    return waits


def read(server) -> ClusterLists:
    return read_cluster(Endpoint(server.url, "test"), "gpu.nvidia.com", timeout_s=5, with_owners=False)


def pages(server, plural="resourceslices") -> list[dict[str, str]]:
    return [request.query for request in server.requests if request.path.endswith(plural)]


def test_nobody_waits_for_a_server_that_is_well(server, waits):
    read(server)
    assert waits == []


@pytest.mark.parametrize("code", [429, 503])
def test_page_is_asked_for_again_when_server_asks_to_come_back_later(server, waits, code):
    server.faults.fail(3, code, retry_after="7", path="/resourceslices")
    assert read(server).slices == []
    assert len(pages(server)) == 4
    assert all(least <= wait <= most for wait, (least, most) in zip(waits, [(7, 8.4)] * 3, strict=True))
    assert len(set(waits)) == 3


def test_waits_become_longer_and_end_when_server_stays_busy(server, waits):
    server.faults.fail(10_000, 429, retry_after="1", path="/resourceslices")
    with pytest.raises(ApiUnavailableError, match="HTTP 429"):
        read(server)
    steps = [1.6, 3.2, 6.4, 12.8, 25.6]
    assert all(step / 2 <= wait <= step for wait, step in zip(waits, steps, strict=False))
    assert 30 <= sum(waits) <= 60
    assert len(pages(server)) == len(waits) + 1


def test_a_server_that_does_not_ask_for_it_is_not_asked_again(server, waits):
    server.faults.fail(10_000, 503, path="/resourceslices")
    with pytest.raises(ApiUnavailableError, match="HTTP 503"):
        read(server)
    assert (waits, len(pages(server))) == ([], 1)


def test_list_is_read_in_one_piece_once_and_after_a_wait_when_server_forgets_each(server, waits):
    server.faults.fail(10_000, 410, reason="Expired", path="/resourceslices")
    with pytest.raises(ApiRejectedError, match="HTTP 410"):
        read(server)
    (wait,) = waits
    assert 0.8 <= wait <= 1.6
    assert ["limit" in query for query in pages(server)] == [True, False]


class EndlessServer:
    """Answers each request for a list with one more page, under these tokens. Each page takes ten seconds."""

    def __init__(self, waits: list[float], tokens: Iterator[str]) -> None:
        self.waits, self.tokens, self.pages = waits, tokens, 0

    def call(self, method: str, path: str, **rest: object) -> dict[str, object]:
        self.waits.append(10.0)
        self.pages += 1
        return {"items": [], "metadata": {"continue": next(self.tokens)}}


@pytest.mark.parametrize(
    ("tokens", "pages", "why"),
    [
        (itertools.cycle("ab"), 3, "begins a page for the second time"),
        (map(str, itertools.count()), 60, "there is no last page after 600 s"),
    ],
)
def test_list_without_an_end_is_refused(server, waits, monkeypatch, tokens, pages, why):
    endless = EndlessServer(waits, tokens)
    monkeypatch.setattr(ApiClient, "request", endless.call)
    with pytest.raises(ApiUnavailableError, match=why):
        read(server)
    assert endless.pages == pages
