"""A real Kubernetes node on this machine, for tests and for trying things out.

Tests add ``hack/cluster`` to ``sys.path`` and use the functions below. Like the
command line, each function finds the cluster through environment variables.
"""

from __future__ import annotations

from pathlib import Path

from localcluster import binaries, debian, images, lifecycle
from localcluster.chart import helm, manifests
from localcluster.components import NAMES as COMPONENTS
from localcluster.components import Options
from localcluster.images import WORKLOAD_IMAGE
from localcluster.layout import NODE_NAME, Addresses, Layout
from localcluster.lifecycle import ComponentStatus
from localcluster.shell import ClusterError

__all__ = [
    "COMPONENTS", "NODE_NAME", "WORKLOAD_IMAGE", "ClusterError", "ComponentStatus", "Options", "addresses", "allocator",
    "build", "cdi_hook", "compute_domains_chart", "down", "fetch", "helm", "is_up", "kubeconfig", "kubectl",
    "load_image", "manifests", "metadata_reader", "program", "promql", "restart", "start", "state", "stop", "up",
]  # fmt: skip


def build() -> Path:
    """Build the missing programs, and return their directory."""
    return binaries.build(_layout())


def fetch() -> None:
    """Build and download everything that a cluster and its tests need, so that both work without a network."""
    debian.install_missing({**debian.CLUSTER_PACKAGES, "iptables": "iptables"})
    debian.provide(_layout().from_debian)
    build()
    for major in binaries.HELM:
        helm(major)
    for part in (allocator, promql, metadata_reader, cdi_hook, compute_domains_chart):
        part()


def up(options: Options | None = None) -> None:
    """Start the cluster, or complete it. Return when the node is ready."""
    lifecycle.up(_layout(), options or Options())


def down() -> None:
    """Remove the cluster and everything that it created. Do nothing if there is no cluster."""
    lifecycle.down(_layout())


def start(component: str) -> None:
    """Start one stopped component, and wait until it is healthy."""
    lifecycle.change(_layout(), component, stop=False, start=True)


def stop(component: str) -> None:
    """Stop one component; pods keep running."""
    lifecycle.change(_layout(), component, stop=True, start=False)


def restart(component: str) -> None:
    """Restart one component with the same flags."""
    lifecycle.change(_layout(), component, stop=True, start=True)


def state() -> list[ComponentStatus]:
    """Return the status of each component."""
    return lifecycle.state(_layout())


def is_up() -> bool:
    """Whether every component is healthy."""
    return all(row.healthy for row in state())


def load_image(archive: Path) -> list[str]:
    """Import the images of a docker or OCI archive into the node, and return their names."""
    snapshotter = lifecycle.options_of(_layout()).snapshotter
    return images.load(_layout(), binaries.directory(_layout()), archive, snapshotter)


def addresses() -> Addresses:
    """Return the cluster's addresses, which depend on its IP family."""
    return lifecycle.options_of(_layout()).addresses


def kubeconfig() -> Path:
    """Return the path of the administrator's kubeconfig, which ``up`` writes."""
    return _layout().kubeconfig


def program(name: str) -> Path:
    """Return the path of a program of the cluster, such as ``ctr``."""
    return binaries.directory(_layout()) / name


def kubectl() -> Path:
    """Return the path of kubectl in the cluster's version."""
    return program("kubectl")


def allocator() -> Path:
    """Return a program that runs kube-scheduler's allocator (go/allocator/main.go). Build it if it is missing."""
    return binaries.build(_layout(), ("allocator",)) / "allocator"


def promql() -> Path:
    """Return a program that runs Prometheus' query engine (go/promql/main.go). Build it if it is missing."""
    return binaries.build(_layout(), ("promql",)) / "promql"


def metadata_reader() -> Path:
    """Return a program that runs Kubernetes' reader of device metadata (go/metadata/main.go). Build it if missing."""
    return binaries.build(_layout(), ("metadata",)) / "metadata"


def cdi_hook() -> Path:
    """Return NVIDIA's CDI hook in a pinned version. Build it if it is missing."""
    return binaries.build(_layout(), ("nvidia-cdi-hook",)) / "nvidia-cdi-hook"


def compute_domains_chart() -> Path:
    """Return the directory of the chart of NVIDIA's DRA driver in a pinned version."""
    return binaries.source_of(*binaries.COMPUTE_DOMAINS) / "deployments/helm/dra-driver-nvidia-gpu"


def _layout() -> Layout:
    return Layout.from_environment()
