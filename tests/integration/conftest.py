"""A whole node: the real daemon on a simulated machine, with the playground's API server, scheduler and kubelet."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.node import DRIVER, PlaygroundNode
from playground.scheduler import reserve

from dra_driver.app.daemon import Driver
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.waiting import eventually

NODE = "node-a"

Json = dict[str, Any]


_ADDRESSES = itertools.count()


def own_address() -> str:
    """An address for a daemon's HTTP endpoint. No other process of the machine uses this loopback address; a port of
    127.0.0.1 that is free now may be taken before the daemon listens.
    """
    number = os.getpid() * 64 + next(_ADDRESSES)
    return f"127.{128 + (number >> 16 & 63)}.{number >> 8 & 255}.{number & 255}:21317"


def page(address: str, path: str, part: str) -> str:
    """The page, with any status, as soon as it contains `part`."""

    def read() -> str | None:
        with suppress(OSError):
            connection = HTTPConnection(address, timeout=5)
            with closing(connection):
                connection.request("GET", path)
                text = connection.getresponse().read().decode()
                return text if part in text and text else None
        return None

    return str(eventually(read))


def result(device: str, request: str = "gpu", **more: Any) -> Json:
    """A device in the allocation of a claim."""
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": device, **more}


def opaque(kind: str = "GpuConfig", **fields: Any) -> list[Json]:
    """A claim's config of an allocation."""
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **fields}
    return [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": body}}]


def parameters(kind: str = "GpuConfig", **sharing: Any) -> list[Json]:
    return opaque(kind, sharing=sharing)


def sliced(interval: str) -> list[Json]:
    return parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": interval})


class Node(PlaygroundNode):
    """One node below `root`. `start_driver` may be called again after `driver.stop()`, as after a restart."""

    driver: Any
    """The daemon in this process; None before the first start."""

    def __init__(self, root: Path, machine: str = "dgx-h100", **server: Any) -> None:
        super().__init__(root, machine, name=NODE, server=PlaygroundApiServer(**server))
        self.driver = None
        self._processes: list[Any] = []

    def start_driver(self, **changes: Any) -> Driver:
        driver = self.driver = Driver(replace(self.settings, **changes))
        driver.start()
        # Not by the number of instances: there are two in a rolling update.
        eventually(lambda: not any("kubelet" in problem for problem in driver.problems()))
        eventually(lambda: any(entry.connected for entry in self.kubelet.instances(DRIVER)))
        return driver

    def running(self, devices: int = 8, **changes: Any) -> Self:
        """The node with a driver that has published so many devices, and has registered the events of every GPU."""
        driver = self.start_driver(**changes)
        self.wait_devices(devices)
        inventory = driver.discovery.latest()
        if inventory is not None and inventory.gpus:
            eventually(lambda: has_registered_events(driver))
        return self

    def stop_driver(self) -> None:
        self.driver.stop()
        self.driver = None

    def reload_nvidia_driver(self) -> None:
        self.machine.unload_driver()
        self.wait_devices(0)
        self.machine.load_driver()
        self.wait_devices(8)

    def restart_driver(self, **changes: Any) -> Driver:
        self.driver.stop()
        return self.start_driver(**changes)

    def spawn(
        self, *, behind: Sequence[str] = (), before: str = "", umask: int = -1, **environment: str
    ) -> Any:
        """Start the daemon as a process, which ends with the node at the latest. Needed because NVML is
        global in a process.

        `behind` is a command that runs it, `before` is Python that runs in it first.
        """
        main = ["-c", f"{before}\nfrom dra_driver.cli.main import main\nmain()"]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        own = self.environment() | self.service_account() | {"KUBECONFIG": "", "LOG_LEVEL": "warning"}
        process = subprocess.Popen(
            [*behind, sys.executable, *(main if before else ["-m", "dra_driver.cli.main"]), "run"],
            env=kept | own | environment,
            umask=umask,
            stderr=subprocess.PIPE,
        )
        self._processes.append(process)
        return process

    def stand_by(self, **environment: str) -> Any:
        """Start a daemon that no kubelet finds, so it stands by beside the one that works."""
        registry = self.root / "elsewhere"
        registry.mkdir()
        return self.spawn(KUBELET_REGISTRAR_DIRECTORY_PATH=str(registry), POD_UID="newer", **environment)

    @property
    def machine_flags(self) -> list[str]:
        """With which a command finds the node's machine and the plugin's files."""
        return self.flags(("--simulate", "--simulator-dir", "--kubelet-plugins-directory-path"))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stderr.close()
        if self.driver is not None:
            self.driver.stop()
        super().stop()

    def slices(self) -> list[Json]:
        return self.server.objects("resourceslices")

    def wait_devices(self, count: int) -> list[Json]:
        """Return the devices once there are so many, without the copies that `devices` makes."""
        kind = self.server.resource("resourceslices")

        def complete() -> list[list[Json]]:
            slices, _ = self.server.store.select(kind, lambda _: True)
            found = [device for one in slices for device in one["spec"].get("devices", ())]
            return [found] if len(found) == count else []

        [found] = eventually(complete)
        return found

    def claim(
        self, name: str, devices: Json | None = None, *, status: Json | None = None, **metadata: Any
    ) -> ClaimRef:
        """Add a claim (by default for one GPU) and, unless a status is given, have it allocated; a pod uses it."""
        one = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}
        body: Json = {
            "metadata": {"name": name, "namespace": "default", **metadata},
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
        self, name: str, *devices: str | Json, config: list[Json] | None = None, **more: Any
    ) -> ClaimRef:
        """A claim whose allocation names these devices, or has these results, whatever a scheduler would say."""
        results = [result(one, **more) if isinstance(one, str) else one for one in devices]
        allocation: Json = {"devices": {"results": results}}
        if config is not None:
            allocation["devices"]["config"] = config
        return self.claim(name, status={"allocation": allocation})

    def share_by_hand(self, number: int, device: str) -> ClaimRef:
        """A share of a device with as many GiB of memory as its number."""
        memory = {"memory": f"{number}Gi"}
        share_id = f"{number}1111111-1111-1111-1111-111111111111"
        return self.allocated_by_hand(f"share-{number}", device, shareID=share_id, consumedCapacity=memory)

    def delete_claim(self, name: str) -> None:
        """Delete the claim in the API server; the kubelet has not unprepared it yet."""
        self.server.operations.delete(self.server.resource("resourceclaims"), ("default", name), {})

    def prepare(self, *refs: ClaimRef) -> dict[str, Any]:
        return self.kubelet.prepare(DRIVER, list(refs))

    def ready(self, ref: ClaimRef) -> Prepared:
        """The answer to a Prepare that must succeed."""
        outcome = self.prepare(ref)[ref.uid]
        assert isinstance(outcome, Prepared), outcome
        return outcome

    def refused(self, ref: ClaimRef, *parts: str) -> str:
        """Return the error of a Prepare that must fail: one line with these parts. Asserts that nothing
        remains.
        """
        before = self.specs(), self.records()
        outcome = self.prepare(ref)[ref.uid]
        assert isinstance(outcome, Failed), outcome
        assert "\n" not in outcome.error
        assert all(part in outcome.error for part in parts), outcome.error
        assert (self.specs(), self.records()) == before
        return outcome.error

    def unprepare(self, *refs: ClaimRef) -> dict[str, Any]:
        return self.kubelet.unprepare(DRIVER, list(refs))

    def must_unprepare(self, *refs: ClaimRef) -> None:
        """An Unprepare that must succeed."""
        assert self.unprepare(*refs) == {ref.uid: None for ref in refs}

    def events(self, reason: str) -> list[Json]:
        return [event for event in self.server.objects("events", group="") if event["reason"] == reason]

    def recorded(self) -> list[ClaimRef]:
        """What an Unprepare needs of each claim with a record."""
        return [ClaimRef("default", "any", name.removesuffix(".json")) for name in self.records()]

    def specs(self) -> list[str]:
        return sorted(path.name for path in self.cdi.glob("*")) if self.cdi.exists() else []

    def records(self) -> list[str]:
        # A killed writer leaves a hidden file, which is removed later.
        return sorted(path.name for path in (self.plugin_dir / "claims").glob("[!.]*"))


def poll_all(driver: Driver) -> None:
    """Have the health of every GPU polled now."""
    for poller in driver.health.monitor.pollers.values():
        poller.poll_soon()


def has_registered_events(driver: Driver) -> bool:
    """Whether it was tried for every GPU: some do not support it."""
    monitor = driver.health.monitor
    newest = monitor.source.set_number()
    numbers = {poller._set_number for poller in monitor.pollers.values()}
    return newest is not None and numbers == {newest}


def received(driver: Driver) -> int:
    """Of how many GPUs the events reach the plugin."""
    monitor = driver.health.monitor
    newest = monitor.source.set_number()
    return sum(
        poller._registration_problem is None and poller._set_number == newest
        for poller in monitor.pollers.values()
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor waits for NVML events and notices its stop only afterwards."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("dra_driver.health.monitor._CHECK_EVERY_S", 0.2)
    monkeypatch.setattr("dra_driver.inventory.discovery._CHECK_EVERY_S", 0.5)


@pytest.fixture(scope="module")
def directory_of_nodes(_memory_root: Path) -> str:
    return str(_memory_root)


@pytest.fixture
def make_node(directory_of_nodes: str) -> Iterator[Callable[..., Node]]:
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
    return make_node().running()
