"""A real Kubernetes node on this machine, for tests and for trying things out.

Tests put ``hack/cluster`` on ``sys.path`` and use the functions below; each
finds the cluster by the environment, as the command line does.
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
    """Build the programs that are missing; the directory they lie in."""
    return binaries.build(_layout())


def fetch() -> None:
    """Build and download all that a cluster and the tests on it need: they then come without a network."""
    debian.install_missing(debian.CLUSTER_PACKAGES)
    build()
    for major in binaries.HELM:
        helm(major)
    for part in (allocator, promql, metadata_reader, cdi_hook, compute_domains_chart):
        part()
    images.static_busybox(_layout())


def up(options: Options | None = None) -> None:
    """Starts the cluster, or completes it; returns when the node is ready."""
    lifecycle.up(_layout(), options or Options())


def down() -> None:
    """Remove the cluster and everything it left behind. Does nothing if there is no cluster."""
    lifecycle.down(_layout())


def start(component: str) -> None:
    """Start one stopped component and wait until it serves."""
    lifecycle.change(_layout(), component, stop=False, start=True)


def stop(component: str) -> None:
    """Stop one component; running pods stay."""
    lifecycle.change(_layout(), component, stop=True, start=False)


def restart(component: str) -> None:
    """Stop and start one component with the same flags."""
    lifecycle.change(_layout(), component, stop=True, start=True)


def state() -> list[ComponentStatus]:
    """One row for each component."""
    return lifecycle.state(_layout())


def is_up() -> bool:
    """Whether every component runs and serves."""
    return all(row.healthy for row in state())


def load_image(archive: Path) -> list[str]:
    """Give the node the images of a docker or OCI archive; returns their names."""
    return images.load(_layout(), binaries.directory(_layout()), archive)


def addresses() -> Addresses:
    """The addresses of the IP family that the cluster was started with."""
    return lifecycle.options_of(_layout()).addresses


def kubeconfig() -> Path:
    """The administrator's kubeconfig, at this path from the first ``up`` on."""
    return _layout().kubeconfig


def program(name: str) -> Path:
    """Where a program of the cluster lies, such as ``ctr``."""
    return binaries.directory(_layout()) / name


def kubectl() -> Path:
    """The kubectl of the cluster's own version."""
    return program("kubectl")


def allocator() -> Path:
    """The allocator of kube-scheduler as a program (go/allocator/main.go), built first if it is not there."""
    return binaries.build(_layout(), ("allocator",)) / "allocator"


def promql() -> Path:
    """Return the path of a program that runs Prometheus' query engine (go/promql/main.go). Builds it first if it
    is missing.
    """
    return binaries.build(_layout(), ("promql",)) / "promql"


def metadata_reader() -> Path:
    """Kubernetes' reader of device metadata as a program (go/metadata/main.go), built first if it is not there."""
    return binaries.build(_layout(), ("metadata",)) / "metadata"


def cdi_hook() -> Path:
    """NVIDIA's CDI hook of a pinned version, built first if it is not there."""
    return binaries.build(_layout(), ("nvidia-cdi-hook",)) / "nvidia-cdi-hook"


def compute_domains_chart() -> Path:
    """The published chart of NVIDIA's DRA driver, of a pinned version."""
    return binaries.source_of(*binaries.COMPUTE_DOMAINS) / "deployments/helm/dra-driver-nvidia-gpu"


def _layout() -> Layout:
    return Layout.from_environment()
