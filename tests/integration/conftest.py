"""A whole node: the real daemon on a simulated machine, with the playground's API server, scheduler and kubelet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.node import DRIVER, PlaygroundNode
from playground.scheduler import reserve

from dra_driver.app.daemon import Driver
from dra_driver.model.claim import ClaimRef

NODE = "node-a"

Json = dict[str, Any]


def eventually(check: Callable[[], Any], timeout_s: float = 25.0) -> Any:
    """The first true value of `check`."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


class Node(PlaygroundNode):
    """One node below `root`. `start_driver` may be called again after `driver.stop()`, as after a restart."""

    def __init__(self, root: Path, machine: str = "dgx-h100", **server: Any) -> None:
        super().__init__(root, machine, name=NODE, server=PlaygroundApiServer(**server))
        self.driver: Driver | None = None

    def start_driver(self, **changes: Any) -> Driver:
        driver = self.driver = Driver(replace(self.settings, **changes))
        driver.start()
        # Not by the number of instances: there are two in a rolling update.
        eventually(lambda: not any("kubelet" in problem for problem in driver.problems()))
        eventually(lambda: any(entry.connected for entry in self.kubelet.instances(DRIVER)))
        return driver

    def stop(self) -> None:
        if self.driver is not None:
            self.driver.stop()
        super().stop()

    def slices(self) -> list[Json]:
        return self.server.objects("resourceslices")

    def wait_devices(self, count: int) -> list[Json]:
        return eventually(lambda: devices if len(devices := self.devices()) == count else None)

    def claim(self, name: str, devices: Json | None = None, *, status: Json | None = None) -> ClaimRef:
        """Add a claim (by default for one GPU) and, unless a status is given, have it allocated; a pod uses it."""
        one = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}
        body: Json = {
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"devices": devices or one},
        }
        pod = {"metadata": {"name": f"pod-of-{name}", "uid": f"pod-of-{name}"}}
        if status is not None:
            body["status"] = dict(status)
            if status.get("allocation"):
                reserve(body["status"], pod)
        stored = self.server.add("resourceclaims", body, group="resource.k8s.io")
        if status is None:
            self.scheduler.allocate_claim("default", name, pod=pod)
        return ClaimRef("default", name, stored["metadata"]["uid"])

    def allocated_by_hand(
        self, name: str, *devices: str, config: list[Json] | None = None, **more: Any
    ) -> ClaimRef:
        """A claim whose allocation names these devices, whatever a scheduler would say."""
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device, **more} for device in devices
        ]
        allocation: Json = {"devices": {"results": results}}
        if config is not None:
            allocation["devices"]["config"] = config
        return self.claim(name, status={"allocation": allocation})

    def prepare(self, *refs: ClaimRef) -> dict[str, Any]:
        return self.kubelet.prepare(DRIVER, list(refs))

    def prepare_in_a_hurry(self, *refs: ClaimRef) -> dict[str, Any]:
        """With a short deadline: while the API server is away, the driver tries again until shortly before it."""
        return self.kubelet.prepare(DRIVER, list(refs), timeout_s=10)

    def unprepare(self, *refs: ClaimRef) -> dict[str, Any]:
        return self.kubelet.unprepare(DRIVER, list(refs))

    def specs(self) -> list[str]:
        return sorted(path.name for path in self.cdi.glob("*")) if self.cdi.exists() else []

    def records(self) -> list[str]:
        # A writer that was killed leaves a hidden file, which is cleared away later.
        return sorted(path.name for path in (self.plugin_dir / "claims").glob("[!.]*"))


@pytest.fixture(autouse=True)
def _quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor waits for events in NVML and hears of its end afterwards."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)


@pytest.fixture(scope="module")
def directory_of_nodes(_memory_root: Path) -> Path | None:
    """Where nodes are made; None is the disk, for MPS daemons, which have a /dev/shm of their own."""
    return _memory_root


@pytest.fixture
def make_node(directory_of_nodes: Path | None) -> Iterator[Callable[..., Node]]:
    """Nodes in short directories of their own: the path of a socket has 107 bytes at most."""
    with ExitStack() as stack:

        def make(machine: str = "dgx-h100", **server: Any) -> Node:
            root = Path(stack.enter_context(TemporaryDirectory(prefix="n-", dir=directory_of_nodes)))
            node = Node(root, machine, **server)
            stack.callback(node.stop)
            return node

        yield make


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A DGX H100 with its eight devices published."""
    made = make_node()
    made.start_driver()
    made.wait_devices(8)
    return made
