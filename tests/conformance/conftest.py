"""Nodes for the conformance tests: in memory, and without the daemon's longer waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dra_driver.embedded.kubelet import EmbeddedKubelet, KubeletSettings
from tests.e2e.conftest import _cluster, cluster, example
from tests.integration.conftest import Json, Node, eventually

__all__ = ["_cluster", "cluster", "example"]

Process = subprocess.Popen[bytes]

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


class ConformanceNode(Node):
    """A node whose kubelet deletes slices as a real one does, and can be exchanged for one of other settings."""

    def use_kubelet(self, **settings: Any) -> EmbeddedKubelet:
        """Another kubelet over the same directories takes over; it begins with deleting the node's slices."""
        return self._exchange(EmbeddedKubelet(self.registry, KubeletSettings(**settings), on_wipe=self._wipe))

    def use_kubelet_quietly(self, **settings: Any) -> EmbeddedKubelet:
        """The same without the deletion."""
        return self._exchange(EmbeddedKubelet(self.registry, KubeletSettings(**settings)))

    def _exchange(self, kubelet: EmbeddedKubelet) -> EmbeddedKubelet:
        self.kubelet.stop()
        self.kubelet = kubelet
        kubelet.start()
        return kubelet

    def delete_slices(self) -> None:
        resource = self.server.resource("resourceslices")
        for entry in self.slices():
            self.server.operations.delete(resource, ("", entry["metadata"]["name"]), {})

    def delete_claim(self, name: str) -> None:
        resource = self.server.resource("resourceclaims")
        self.server.operations.delete(resource, ("default", name), {})

    def stored_claim(self, name: str) -> Json:
        return next(one for one in self.server.objects("resourceclaims") if one["metadata"]["name"] == name)

    def slice_writes(self) -> list[str]:
        return [request.method for request in self.server.writes("resourceslices")]

    def is_clean(self) -> bool:
        return (self.specs(), self.records()) == ([], [])

    def restart_driver(self, **changes: Any) -> None:
        assert self.driver is not None
        self.driver.stop()
        driver = self.start_driver(**changes)
        eventually(lambda: not driver.problems())

    def _wipe(self, driver: str | None) -> None:
        self.delete_slices()


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ConformanceNode]]:
    monkeypatch.setattr("dra_driver.services.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("dra_driver.services.discovery._LOOK_EVERY_S", 0.1)
    with ExitStack() as stack:

        def make(machine: str = "dgx-h100") -> ConformanceNode:
            root = Path(stack.enter_context(TemporaryDirectory(prefix="n-", dir=_MEMORY)))
            node = ConformanceNode(root, machine)
            stack.callback(node.stop)
            return node

        yield make


@pytest.fixture
def node(make_node: Callable[..., ConformanceNode]) -> ConformanceNode:
    """A DGX H100 with its eight devices published and the kubelet content with the driver."""
    made = make_node()
    driver = made.start_driver()
    made.wait_devices(8)
    eventually(lambda: not driver.problems())
    return made


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    """Starts the daemon as a process, as an update needs it: NVML is one for all of a process."""
    started: list[Process] = []

    def start(node: Node, **environment: str) -> Process:
        settings = node.settings
        variables = {
            "NODE_NAME": settings.node_name,
            "CDI_ROOT": settings.cdi_root,
            "KUBELET_REGISTRAR_DIRECTORY_PATH": settings.kubelet_registrar_directory_path,
            "KUBELET_PLUGINS_DIRECTORY_PATH": settings.kubelet_plugins_directory_path,
            "KUBECONFIG": str(settings.kubeconfig),
            "SIMULATE": str(settings.simulate),
            "SIMULATOR_DIR": str(settings.simulator_dir),
            "LOG_LEVEL": "warning",
        }
        command = [sys.executable, "-m", "dra_driver.cli.main", "run"]
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        started.append(subprocess.Popen(command, env=kept | variables | environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(process: Process) -> None:
    """End a daemon in order."""
    process.terminate()
    assert process.wait(20) == 0


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The thread in which a call runs, and where its answer will lie."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers
