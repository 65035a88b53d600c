"""The API server that is measured: the playground one as a process, a real one started here, or one that runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playground.apiserver.server import PlaygroundApiServer
from processes import resident_mib, ticks_cpu_s, wait_for

from dra_driver.errors import DraDriverError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is, and its processes by name."""

    kubeconfig: Path
    pids: dict[str, int]

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of each process."""
        return {name: resident_mib(pid) for name, pid in self.pids.items()}

    def cpu_s(self) -> float:
        """Processor seconds of all of them."""
        return sum(map(ticks_cpu_s, self.pids.values()))


@contextlib.contextmanager
def playground(scratch: Path) -> Iterator[Server]:
    """The playground's API server as a process."""
    kubeconfig = scratch / "kubeconfig"
    command = [sys.executable, __file__, str(kubeconfig)]
    imports = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=os.environ | imports, stdin=subprocess.PIPE)
    try:
        _wait_ready(kubeconfig)
        yield Server(kubeconfig, {"playground's API server": process.pid})
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def started(binaries: Path, scratch: Path) -> Iterator[Server]:
    """etcd and kube-apiserver from a directory, on free ports of loopback; ended afterwards."""
    client, peer, api = (_free_port() for _ in range(3))
    token, key = secrets.token_hex(16), scratch / "service-account.key"
    (scratch / "tokens.csv").write_text(f"{token},scale,scale,system:masters\n")
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    with (scratch / "servers.log").open("wb") as log:
        etcd = subprocess.Popen(
            [
                str(binaries / "etcd"),
                f"--data-dir={scratch}/etcd",
                f"--listen-client-urls=http://127.0.0.1:{client}",
                f"--advertise-client-urls=http://127.0.0.1:{client}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
                "--log-level=warn",
            ],
            stdout=log,
            stderr=log,
        )
        server = subprocess.Popen(
            [
                str(binaries / "kube-apiserver"),
                "--bind-address=127.0.0.1",
                f"--secure-port={api}",
                f"--cert-dir={scratch}/certificates",
                "--endpoint-reconciler-type=none",
                f"--etcd-servers=http://127.0.0.1:{client}",
                f"--token-auth-file={scratch}/tokens.csv",
                "--authorization-mode=AlwaysAllow",
                "--service-account-issuer=https://scale.invalid",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-cluster-ip-range=10.0.0.0/24",
            ],
            stdout=log,
            stderr=log,
        )
        kubeconfig = scratch / "kubeconfig"
        kubeconfig.write_text(json.dumps(_document(f"https://127.0.0.1:{api}", token)))
        try:
            _wait_ready(kubeconfig)
            yield Server(kubeconfig, {"kube-apiserver": server.pid, "etcd": etcd.pid})
        finally:
            for process in (server, etcd):
                process.terminate()
                process.wait(30)


@contextlib.contextmanager
def given(kubeconfig: Path, pids: dict[str, int]) -> Iterator[Server]:
    """A server that runs already."""
    yield Server(kubeconfig, pids)


def _document(url: str, token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "scale", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "scale", "user": {"token": token}}],
        "contexts": [{"name": "scale", "context": {"cluster": "scale", "user": "scale"}}],
        "current-context": "scale",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(kubeconfig: Path) -> None:
    def is_ready() -> bool:
        with contextlib.suppress(DraDriverError):
            client = ApiClient(load_endpoint(str(kubeconfig)))
            try:
                client.request("GET", "/apis/resource.k8s.io/v1/resourceslices", action="list slices")
            finally:
                client.close()
            return True
        return False

    wait_for(is_ready, every_s=0.1, what="the API server")


def _serve(kubeconfig: Path) -> None:
    """The playground's API server until standard input ends."""
    with PlaygroundApiServer(history=100_000) as server:
        server.write_kubeconfig(kubeconfig)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
