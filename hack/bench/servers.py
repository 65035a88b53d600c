"""The API server to measure: the playground's in a separate process, or one that is already running."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from playground.apiserver.server import PlaygroundApiServer
from processes import cpu_s, resident_mib, wait_for

from dra_driver.errors import DraDriverError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint


@dataclass(frozen=True, slots=True)
class Server:
    """An API server: its kubeconfig, and its processes by name."""

    kubeconfig: Path
    pids: dict[str, int]
    forget: Callable[[], None] | None = None
    """Breaks all watches, and makes each new one fail with 410; None if the server does not support that."""

    def resident_mib(self) -> dict[str, float]:
        """Return the resident memory of each process in MiB."""
        return {name: resident_mib(pid) for name, pid in self.pids.items()}

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes together."""
        return sum(map(cpu_s, self.pids.values()))


@contextlib.contextmanager
def playground(scratch: Path) -> Iterator[Server]:
    """Run the playground's API server as a separate process."""
    kubeconfig = scratch / "kubeconfig"
    command = [sys.executable, __file__, str(kubeconfig)]
    imports = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=os.environ | imports, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        _wait_ready(kubeconfig)
        yield Server(kubeconfig, {"playground's API server": process.pid}, process.stdin.close)
    finally:
        process.kill()
        process.wait()


def _wait_ready(kubeconfig: Path) -> None:
    def is_ready() -> bool:
        with contextlib.suppress(DraDriverError):
            client = ApiClient(load_endpoint(str(kubeconfig)))
            try:
                slices, first = "/apis/resource.k8s.io/v1/resourceslices", {"limit": "1"}
                client.request("GET", slices, query=first, action="list slices")
            finally:
                client.close()
            return True
        return False

    wait_for(is_ready, every_s=0.1, what="the API server")


def _serve(kubeconfig: Path) -> None:
    """Run the playground's API server until it is killed. When standard input ends, break all watches, and let new ones
    fail with 410.
    """
    with PlaygroundApiServer(history=100_000) as server:
        server.write_kubeconfig(kubeconfig)
        sys.stdin.read()
        server.faults.fail(sys.maxsize, 410, reason="Expired", path="watch=true")
        server.faults.cut_watches()
        threading.Event().wait()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
