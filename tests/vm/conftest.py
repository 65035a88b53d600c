"""The guest of `make e2e-vm` as a node: its kernel, the playground's API server, scheduler and kubelet, and a
daemon that may be killed. The tests of one boot share it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_GUEST = Path("/dev/ttyS2").exists() and Path("/guest.sh").exists()
collect_ignore_glob = [] if IN_GUEST else ["test_*.py"]

LIMIT_S = 120.0
"""For whatever the guest does, on any host: ten times of what it takes on an idle one."""
PCI = Path("/sys/bus/pci")
SLOW = Path("/sys/module/nvidia/parameters/slow_ms")
GPUS = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0")
AUDIO = "0000:01:00.1"
SAVED = Path("/run/node/plugins/claims.json")
POD_UID = "11111111-2222-3333-4444-555555555555"


def eventually(what: str, check: Callable[[], Any], timeout_s: float = LIMIT_S) -> Any:
    """The first true value of `check`."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)
    return value


def driver_of(bus_id: str) -> str | None:
    """The kernel driver of a PCI function."""
    driver = PCI / "devices" / bus_id / "driver"
    return driver.resolve().name if driver.exists() else None


def programs() -> dict[int, str]:
    """The command line of each process that has one, a zombie has none; by process ID."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0]:
            found[int(path.name)] = b" ".join(words).decode(errors="replace")
    return found


def order(command: str) -> None:
    """Have QEMU's monitor carry out a command."""
    with Path("/dev/ttyS2").open("wb", buffering=0) as line:
        line.write(f"{command}\n".encode())


class Vm:
    """The node. `log` is what all its daemons have logged, `kept` the claims of the boot before."""

    def __init__(self, directory: Path) -> None:
        from playground.node import DRIVER, PlaygroundNode

        self.driver = DRIVER
        self.node = PlaygroundNode(directory, str(ROOT / "tests/vm/machine.yaml"), name="vm")
        self.log = directory / "log"
        self.daemon: subprocess.Popen[bytes] | None = None
        self.kept = self.load_claims()

    def start(self, *flags: str) -> None:
        """Start a daemon, and wait until it serves and has published."""
        names = (name for name in self.node.options if name != "--kubeconfig")
        command = [sys.executable, str(ROOT / "tests/vm/dra_driver_node.py"), "run", *self.node.flags(names)]
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [*command, "--passthrough", *flags],
                env={**os.environ, **self.node.service_account()},
                stdout=log,
                stderr=log,
            )
        instances = self.node.kubelet.instances
        eventually("the registration", lambda: any(one.connected for one in instances(self.driver)))
        eventually("the slices", self.node.devices)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon by a signal, and wait for it."""
        daemon, self.daemon = self.daemon, None
        assert daemon is not None
        daemon.send_signal(number)
        daemon.wait(LIMIT_S)

    def devices(self, bus_id: str) -> list[str]:
        """The types of the published devices of a GPU without taints."""
        return sorted(
            device["attributes"]["type"]["string"]
            for device in self.node.devices()
            if device["attributes"]["resource.kubernetes.io/pciBusID"]["string"] == bus_id
            and not device.get("taints")
        )

    def claim(self, name: str, bus_id: str, *, vm: bool = True) -> Any:
        """A claim that is allocated a GPU, for a virtual machine or for containers."""
        from dra_driver.model.claim import ClaimRef

        expression = f'device.attributes["resource.kubernetes.io"].pciBusID == "{bus_id}"'
        exactly = {
            "deviceClassName": "vfio.gpu.nvidia.com" if vm else "gpu.nvidia.com",
            "selectors": [{"cel": {"expression": expression}}],
        }
        devices = {"requests": [{"name": "gpu", "exactly": exactly}]}
        entry = {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": devices}}
        self.node.server.add("resourceclaims", entry, group="resource.k8s.io")
        made = self.node.scheduler.allocate_claim("default", name, node="vm")
        return ClaimRef("default", name, made["metadata"]["uid"])

    def save_claims(self) -> None:
        """Keep the claims over a power cut, as etcd does."""
        SAVED.write_text(json.dumps(self.node.server.objects("resourceclaims")))
        os.sync()

    def load_claims(self) -> list[Any]:
        """Give the API server the claims that were kept."""
        from dra_driver.model.claim import ClaimRef

        found = json.loads(SAVED.read_text()) if SAVED.exists() else []
        resource = self.node.server.resource("resourceclaims")
        for claim in found:
            key = (claim["metadata"]["namespace"], claim["metadata"]["name"])
            with self.node.server.store.changed:
                self.node.server.store.write(resource, key, claim)
        return [
            ClaimRef(*(claim["metadata"][key] for key in ("namespace", "name", "uid"))) for claim in found
        ]

    def call(self, what: str, ref: Any, timeout_s: float = 45.0) -> str | None:
        """One call of the kubelet; its error, None if there is none."""
        answer = getattr(self.node.kubelet, what)(self.driver, [ref], timeout_s=timeout_s)
        return getattr(answer[ref.uid], "error", None)

    def release(self, ref: Any) -> None:
        """Unprepare the claim and delete it."""
        assert self.call("unprepare", ref) is None
        self.node.scheduler.release_claim("default", ref.name)
        server = self.node.server
        server.operations.delete(server.resource("resourceclaims"), ("default", ref.name), {})


@pytest.fixture(scope="session")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    made = Vm(Path("/run/node"))
    made.start()
    yield made
    if made.daemon is not None:
        made.kill(signal.SIGTERM)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show with a failure what the daemon has logged last."""
    outcome = yield
    report = outcome.get_result()
    log = Path("/run/node/log")
    if report.failed and log.exists():
        report.sections.append(("the daemon", "\n".join(log.read_text().splitlines()[-40:])))
