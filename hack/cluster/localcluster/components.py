"""The components: what each is started with and how one sees that it serves (components.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster import layout as places
from localcluster.layout import ADDRESSES, Addresses, Layout, endpoint

_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
NAMES = tuple(_TABLE)


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller of ``up`` may vary; kept, so that a restart uses the same."""

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


def values(layout: Layout, options: Options) -> dict[str, Any]:
    """What the names in components.toml and in the configuration files stand for."""
    return {
        "state": layout.state,
        "config": layout.config,
        "pki": layout.pki,
        "run": layout.run,
        "pod_logs": layout.pod_logs,
        "volume_plugins": layout.volume_plugins,
        "containerd_socket": layout.containerd_socket,
        "containerd_state": layout.containerd_state,
        "kubelet_root": places.KUBELET_ROOT,
        "kubelet_user": "kubelet" if options.kubelet_as_node else "admin",
        "node_name": places.NODE_NAME,
        "addresses": options.addresses,
        "sync_frequency": options.sync_frequency,
        "etcd_url": places.ETCD_URL,
        "etcd_peer_url": f"https://127.0.0.1:{places.ETCD_PEER_PORT}",
        "api_port": places.API_PORT,
        "api_endpoint": endpoint(options.addresses.api, places.API_PORT),
        "controller_manager_port": places.CONTROLLER_MANAGER_PORT,
        "scheduler_port": places.SCHEDULER_PORT,
        "kubelet_port": places.KUBELET_PORT,
        "kubelet_health_port": places.KUBELET_HEALTH_PORT,
    }


def all_components(layout: Layout, binaries: Path, options: Options) -> dict[str, Component]:
    """Every component by name, in starting order."""
    known = values(layout, options) | {"binaries": binaries}
    return {
        name: Component(
            name, tuple(word.format(**known) for word in entry["argv"]), entry["probe"].format(**known)
        )
        for name, entry in _TABLE.items()
    }
