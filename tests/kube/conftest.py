"""Fixtures of the API tests.

`target` runs a test against the playground's API server, or, with DRA_TEST_KUBECONFIG set, against that real cluster
(`pytest -m cluster tests/kube`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slices import SliceCache
from tests.kube.support import DRIVER

_REAL = os.environ.get("DRA_TEST_KUBECONFIG")


@dataclass
class Target:
    """An API server to test against; `server` is None for a real one."""

    kubeconfig: Path
    api: ApiClient
    node: str
    namespace: str
    server: PlaygroundApiServer | None

    def slices(self) -> SliceCache:
        return SliceCache(self.api, DRIVER, self.node)


def _params() -> list[Any]:
    if _REAL:
        return [pytest.param("real", marks=pytest.mark.cluster, id="real")]
    return [pytest.param("playground", id="playground")]


@pytest.fixture(params=_params())
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    node = f"node-{uuid.uuid4().hex[:8]}"
    if request.param == "real":
        yield from _real_target(Path(str(_REAL)), node)
        return
    with PlaygroundApiServer(bookmark_s=0.1) as server:
        kubeconfig = tmp_path / "kubeconfig"
        server.write_kubeconfig(kubeconfig)
        server.add("nodes", {"metadata": {"name": node}})
        client = ApiClient(load_endpoint(kubeconfig), timeout_s=5)
        yield Target(kubeconfig, client, node, "default", server)
        client.close()


def _real_target(kubeconfig: Path, node: str) -> Iterator[Target]:
    client = ApiClient(load_endpoint(kubeconfig), timeout_s=60)
    target = Target(kubeconfig, client, node, "default", None)
    yield target
    for item in target.slices().list()[0]:
        target.slices().delete(item["metadata"]["name"], item["metadata"]["uid"])
    client.close()


@pytest.fixture
def server() -> Iterator[PlaygroundApiServer]:
    with PlaygroundApiServer(bookmark_s=0.1) as server:
        yield server


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., ApiClient]]:
    """Create clients for API servers of the playground, and close them after the test."""
    clients: list[ApiClient] = []

    def make(server: PlaygroundApiServer, *, token: str | None = None, **options: Any) -> ApiClient:
        kubeconfig = tmp_path / f"kubeconfig-{len(clients)}"
        server.write_kubeconfig(kubeconfig, token=token)
        clients.append(ApiClient(load_endpoint(kubeconfig), **({"timeout_s": 5} | options)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
