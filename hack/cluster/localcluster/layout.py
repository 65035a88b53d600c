"""All paths, names, addresses and ports of the cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "gpu-node"
NETWORK = "gpu-dra-cluster"
BRIDGE = "gpu-dra0"
BRIDGE_MAC = "02:00:0a:e7:40:01"

API_PORT = 443
"""On the address of the API server's Service, so that nothing has to redirect connections to the Service."""
# Not the usual ports, because another cluster on this machine may use them.
ETCD_URL = "https://127.0.0.1:22379"
ETCD_PEER_URL = "https://127.0.0.1:22380"
CONTROLLER_MANAGER_PORT = 20257
SCHEDULER_PORT = 20259
KUBELET_HEALTH_PORT = 20248
KUBELET_PORT = 10250

KUBELET_ROOT = Path("/var/lib/kubelet")
CDI_DIRECTORIES = (Path("/etc/cdi"), Path("/var/run/cdi"))
CNI_RESULTS = Path("/var/lib/cni/results")
SHIM_SOCKETS = Path("/run/containerd/s")
CONTAINER_LOG_LINKS = Path("/var/log/containers")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

KUBERNETES = "kubernetes"
CLUSTER_SOURCE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of node, pods and Services for one IP family."""

    node: str
    pods: str
    services: str
    service: str
    """The address of the API server's Service. The API server listens on it, and loopback has it."""
    dns: str
    anywhere: str
    iptables: str

    @property
    def api(self) -> str:
        """The address and port of the API server."""
        return endpoint(self.service, API_PORT)


ADDRESSES = {
    "ipv4": Addresses(
        node="10.231.64.1",
        pods="10.231.64.0/24",
        services="10.96.0.0/16",
        service="10.96.0.1",
        dns="10.96.0.10",
        anywhere="0.0.0.0/0",
        iptables="iptables",
    ),
    "ipv6": Addresses(
        node="fd31:e7a0:64::1",
        pods="fd31:e7a0:64::/64",
        services="fd31:e7a0:96::/112",
        service="fd31:e7a0:96::1",
        dns="fd31:e7a0:96::a",
        anywhere="::/0",
        iptables="ip6tables",
    ),
}


def endpoint(address: str, port: int) -> str:
    """Return ``address:port`` in the notation of URLs."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The directories of a cluster: ``down`` deletes ``state`` and keeps ``cache``.

    ``kubernetes`` is the folder below ``go/`` from which the cluster's programs are built.
    """

    state: Path
    cache: Path
    kubernetes: str = KUBERNETES

    @classmethod
    def from_environment(cls) -> Layout:
        """Return the layout from the variables GPU_DRA_CLUSTER_DIR, XDG_CACHE_HOME and GPU_DRA_KUBERNETES."""
        state = Path(os.environ.get("GPU_DRA_CLUSTER_DIR") or "/var/lib/gpu-dra-cluster")
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        release = os.environ.get("GPU_DRA_KUBERNETES")
        return cls(
            state=state.absolute(),
            cache=Path(cache_home).absolute() / "gpu-dra-driver",
            kubernetes=f"{KUBERNETES}-{release}" if release else KUBERNETES,
        )

    @property
    def binaries(self) -> Path:
        return self.cache / "cluster" / "bin"

    @property
    def from_debian(self) -> Path:
        """The directory of programs that are unpacked from Debian packages, not installed."""
        return self.cache / "cluster" / "from-debian"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def pod_logs(self) -> Path:
        return self.logs / "pods"

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def kubelet(self) -> Path:
        """The directory that is mounted at /var/lib/kubelet while the cluster runs."""
        return self.state / "kubelet"

    @property
    def volume_plugins(self) -> Path:
        return self.state / "volume-plugins"

    @property
    def kubeconfig(self) -> Path:
        return self.config / "admin.kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def containerd_state(self) -> Path:
        return self.run / "containerd"

    def certificate(self, name: str) -> Path:
        return self.pki / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.pki / f"{name}.key"

    def log(self, component: str) -> Path:
        return self.logs / f"{component}.log"
