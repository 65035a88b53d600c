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
from playground.kubelet import KubeletSettings, PlaygroundKubelet
from playground.kubelet_client import KubeletError

from dra_driver.app.daemon import Driver
from dra_driver.kubelet.plugin import KubeletPlugin, PluginSettings
from dra_driver.model.claim import ClaimRef
from tests.e2e.conftest import _cluster, cluster, example
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, Json, Node
from tests.kubelet.support import FakeClaims, Owner

__all__ = ["_cluster", "cluster", "example"]

Process = subprocess.Popen[bytes]

OTHER_DRIVER = "nic.example.com"
SLOW_S = 60.0
"""For what takes a moment, on any machine."""

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


class ConformanceNode(Node):
    """A node whose kubelet deletes slices as a real one does, and can be exchanged for one of other settings."""

    def use_kubelet(self, **settings: Any) -> PlaygroundKubelet:
        """Another kubelet over the same directories takes over; it begins with deleting the node's slices."""
        return self._exchange(
            PlaygroundKubelet(self.registry, KubeletSettings(**settings), on_wipe=lambda _: self.wipe())
        )

    def use_kubelet_quietly(self, **settings: Any) -> PlaygroundKubelet:
        """The same without the deletion."""
        return self._exchange(PlaygroundKubelet(self.registry, KubeletSettings(**settings)))

    def _exchange(self, kubelet: PlaygroundKubelet) -> PlaygroundKubelet:
        self.kubelet.stop()
        self.kubelet = kubelet
        kubelet.start()
        return kubelet

    def stored_claim(self, name: str) -> Json:
        return next(one for one in self.server.objects("resourceclaims") if one["metadata"]["name"] == name)

    def slice_writes(self) -> list[str]:
        return [request.method for request in self.server.writes("resourceslices")]

    def specs(self) -> list[str]:
        # As for records: what a writer that was killed leaves is hidden, and cleared away later.
        return [name for name in super().specs() if not name.startswith(".")]

    def lock_file(self, index: int) -> Path:
        """That of planning on the GPU with this index."""
        return self.plugin_dir / "locks" / f"{self.machine.gpu(index).uuid}.plan.lock"

    def is_clean(self) -> bool:
        return (self.specs(), self.records()) == ([], [])

    def restart_driver(self, **changes: Any) -> Driver:
        driver = super().restart_driver(**changes)
        eventually(lambda: not driver.problems())
        return driver


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ConformanceNode]]:
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("dra_driver.inventory.discovery._LOOK_EVERY_S", 0.1)
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
def other_driver() -> Iterator[Callable[[ConformanceNode, FakeClaims], KubeletPlugin]]:
    """Starts a second driver of data on a node and has it registered."""
    started: list[KubeletPlugin] = []

    def start(node: ConformanceNode, claims: FakeClaims) -> KubeletPlugin:
        settings = PluginSettings(
            driver=OTHER_DRIVER, registry_dir=node.registry, plugins_dir=node.root / "plugins", grace_s=1.0
        )
        plugin = KubeletPlugin(settings, claims, Owner())
        started.append(plugin)
        plugin.start()
        node.kubelet.wait_registered(OTHER_DRIVER, timeout_s=SLOW_S)
        return plugin

    yield start
    for plugin in started:
        plugin.stop()


HOLD_LOCK = """
import fcntl, os, sys
sys.path.insert(0, sys.argv[2])
from dra_driver.base.file_lock import WHOLE_FILE_WRITE_LOCK
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, WHOLE_FILE_WRITE_LOCK)
print("held", flush=True)
sys.stdin.read()
"""


class LockHolder:
    """Another process with the lock of a GPU, as the second instance of an update."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", HOLD_LOCK, str(file), str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "held\n"

    def release(self) -> None:
        """Also after it was let go."""
        self._process.communicate()


def quietly(node: ConformanceNode, ref: ClaimRef, timeout_s: float = 8.0) -> Any:
    """What a Prepare answers, None if the connection breaks."""
    try:
        return node.kubelet.prepare(DRIVER, [ref], timeout_s=timeout_s)[ref.uid]
    except KubeletError:
        return None


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
