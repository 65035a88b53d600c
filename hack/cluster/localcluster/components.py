"""The components: what each is started with and how one sees that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from localcluster.layout import (
    ADDRESSES,
    API_PORT,
    CONTROLLER_MANAGER_PORT,
    ETCD_PEER_PORT,
    ETCD_URL,
    KUBELET_HEALTH_PORT,
    KUBELET_ROOT,
    NODE_NAME,
    SCHEDULER_PORT,
    Addresses,
    Layout,
    endpoint,
)

# Off by default in the pinned release and wanted here: taints from an administrator.
_FEATURE_GATES: Mapping[str, bool] = MappingProxyType({"DRADeviceTaintRules": True})
# The older versions are off by default; a driver's negotiation is tested against them.
_RUNTIME_CONFIG: Mapping[str, bool] = MappingProxyType(
    {"resource.k8s.io/v1beta1": True, "resource.k8s.io/v1beta2": True}
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller of ``up`` may vary; kept, so that a restart uses the same."""

    feature_gates: Mapping[str, bool] = field(default_factory=lambda: _FEATURE_GATES)
    runtime_config: Mapping[str, bool] = field(default_factory=lambda: _RUNTIME_CONFIG)
    kubelet_as_node: bool = False
    ip_family: str = "ipv4"
    sync_frequency: str = "1m"
    """How often the kubelet looks at a pod again for which nothing happened, and half as long more by chance. A
    Prepare that failed is tried again then, and the health of devices shown."""

    @property
    def addresses(self) -> Addresses:
        return ADDRESSES[self.ip_family]


@dataclass(frozen=True, slots=True)
class Component:
    """One daemon: its command line, and the URL or socket that answers when it serves."""

    name: str
    argv: tuple[str, ...]
    probe: str


NAMES = (
    "etcd",
    "containerd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
)


def all_components(layout: Layout, binaries: Path, options: Options) -> dict[str, Component]:
    """Every component by name, in starting order."""
    made = (
        _etcd(layout, binaries),
        _containerd(layout, binaries),
        _apiserver(layout, binaries, options),
        _controller_manager(layout, binaries, options),
        _scheduler(layout, binaries, options),
        _kubelet(layout, binaries, options),
    )
    return {component.name: component for component in made}


def _etcd(layout: Layout, binaries: Path) -> Component:
    """Client certificates on both ports: loopback is open to every local user."""
    peer = f"https://127.0.0.1:{ETCD_PEER_PORT}"
    authority = layout.certificate("ca")
    certificate, key = layout.certificate("etcd"), layout.key("etcd")
    return Component(
        "etcd",
        (
            f"{binaries}/etcd",
            f"--data-dir={layout.state}/etcd",
            f"--listen-client-urls={ETCD_URL}",
            f"--advertise-client-urls={ETCD_URL}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--client-cert-auth",
            f"--trusted-ca-file={authority}",
            f"--cert-file={certificate}",
            f"--key-file={key}",
            "--peer-client-cert-auth",
            f"--peer-trusted-ca-file={authority}",
            f"--peer-cert-file={certificate}",
            f"--peer-key-file={key}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
        f"{ETCD_URL}/health",
    )


def _containerd(layout: Layout, binaries: Path) -> Component:
    return Component(
        "containerd",
        (f"{binaries}/containerd", "--config", f"{layout.config}/containerd.toml"),
        f"unix:{layout.containerd_socket}",
    )


def _apiserver(layout: Layout, binaries: Path, options: Options) -> Component:
    return Component(
        "kube-apiserver",
        (
            f"{binaries}/kube-apiserver",
            f"--bind-address={options.addresses.api}",
            f"--secure-port={API_PORT}",
            f"--advertise-address={options.addresses.node}",
            "--endpoint-reconciler-type=none",
            f"--etcd-servers={ETCD_URL}",
            f"--etcd-cafile={layout.certificate('ca')}",
            f"--etcd-certfile={layout.certificate('etcd')}",
            f"--etcd-keyfile={layout.key('etcd')}",
            f"--client-ca-file={layout.certificate('ca')}",
            f"--tls-cert-file={layout.certificate('apiserver')}",
            f"--tls-private-key-file={layout.key('apiserver')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={layout.certificate('service-account')}",
            f"--service-account-signing-key-file={layout.key('service-account')}",
            f"--service-cluster-ip-range={options.addresses.services}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-certificate-authority={layout.certificate('ca')}",
            f"--kubelet-client-certificate={layout.certificate('admin')}",
            f"--kubelet-client-key={layout.key('admin')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--runtime-config={_flags(options.runtime_config)}",
            f"--feature-gates={_flags(options.feature_gates)}",
        ),
        f"https://{endpoint(options.addresses.api, API_PORT)}/readyz",
    )


def _controller_manager(layout: Layout, binaries: Path, options: Options) -> Component:
    return Component(
        "kube-controller-manager",
        (
            f"{binaries}/kube-controller-manager",
            *_served_locally(layout, "kube-controller-manager", CONTROLLER_MANAGER_PORT),
            "--use-service-account-credentials",
            f"--flex-volume-plugin-dir={layout.volume_plugins}",
            f"--root-ca-file={layout.certificate('ca')}",
            f"--service-account-private-key-file={layout.key('service-account')}",
            f"--cluster-signing-cert-file={layout.certificate('ca')}",
            f"--cluster-signing-key-file={layout.key('ca')}",
            f"--feature-gates={_flags(options.feature_gates)}",
        ),
        f"https://127.0.0.1:{CONTROLLER_MANAGER_PORT}/healthz",
    )


def _scheduler(layout: Layout, binaries: Path, options: Options) -> Component:
    return Component(
        "kube-scheduler",
        (
            f"{binaries}/kube-scheduler",
            *_served_locally(layout, "kube-scheduler", SCHEDULER_PORT),
            f"--feature-gates={_flags(options.feature_gates)}",
        ),
        f"https://127.0.0.1:{SCHEDULER_PORT}/healthz",
    )


def _kubelet(layout: Layout, binaries: Path, options: Options) -> Component:
    """The admin's identity, on purpose, unless somebody asks for the node's.

    As a node the kubelet loses a race against the node authorizer's graph for
    about one claim in eight, and such a pod waits a minute for the next try.
    """
    kubeconfig = layout.config / "kubelet.kubeconfig" if options.kubelet_as_node else layout.kubeconfig
    return Component(
        "kubelet",
        (
            f"{binaries}/kubelet",
            f"--config={layout.config}/kubelet.json",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={KUBELET_ROOT}",
            f"--cert-dir={layout.pki}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={options.addresses.node}",
        ),
        f"http://127.0.0.1:{KUBELET_HEALTH_PORT}/healthz",
    )


def _served_locally(layout: Layout, name: str, port: int) -> tuple[str, ...]:
    """Flags that the controller manager and the scheduler share."""
    kubeconfig = f"{layout.config}/{name}.kubeconfig"
    return (
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={layout.certificate('apiserver')}",
        f"--tls-private-key-file={layout.key('apiserver')}",
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
    )


def _flags(switches: Mapping[str, bool]) -> str:
    return ",".join(f"{name}={str(on).lower()}" for name, on in sorted(switches.items()))
