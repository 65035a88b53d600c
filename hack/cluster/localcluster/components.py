"""The components of the cluster: their command lines and probes (components.toml), and their configuration files
(configs.toml)."""

from __future__ import annotations

import base64
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster import layout as places
from localcluster.layout import ADDRESSES, NETWORK, Addresses, Layout

_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
NAMES = tuple(_TABLE)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``up``. They are saved, so that a restart of a component uses the same options."""

    kubelet_as_node: bool = False
    ip_family: str = "ipv4"
    snapshotter: str = "overlayfs"
    """containerd's: `native` where the machine has no overlayfs."""
    sync_frequency: str = "1m"
    """How often the kubelet syncs a pod that has no events; the kubelet adds up to 50% at random. In a sync, it retries
    a failed Prepare, and updates the health of devices."""

    @property
    def addresses(self) -> Addresses:
        return ADDRESSES[self.ip_family]

    @property
    def kubelet_user(self) -> str:
        return "kubelet" if self.kubelet_as_node else "admin"


@dataclass(frozen=True, slots=True)
class Component:
    """A daemon: its command line, and the URL or socket that answers if it is healthy."""

    name: str
    argv: tuple[str, ...]
    probe: str


def all_components(layout: Layout, binaries: Path, options: Options) -> dict[str, Component]:
    """Return every component by name, in the order in which they start."""
    known = {"layout": layout, "options": options, "places": places, "binaries": binaries}
    return {
        name: Component(
            name, tuple(word.format(**known) for word in entry["argv"]), entry["probe"].format(**known)
        )
        for name, entry in _TABLE.items()
    }


PAUSE_IMAGE = "local/pause:1"
_USERS = ("admin", "kube-controller-manager", "kube-scheduler", "kubelet")


def write_configs(layout: Layout, options: Options) -> None:
    """Write all configuration files. Their content depends only on the arguments, so overwriting them is safe."""
    layout.config.mkdir(parents=True, exist_ok=True, mode=0o700)
    for user in _USERS:
        path = layout.config / f"{user}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(_kubeconfig(layout, user, options.addresses))
    known = {
        "layout": layout,
        "options": options,
        "places": places,
        "pause_image": PAUSE_IMAGE,
        "cdi_directories": json.dumps([str(path) for path in places.CDI_DIRECTORIES]),
    }
    (layout.config / "cni").mkdir(exist_ok=True)
    for name, template in tomllib.loads(Path(__file__).with_name("configs.toml").read_text()).items():
        (layout.config / name).write_text(template.format(**known))


def _kubeconfig(layout: Layout, user: str, addresses: Addresses) -> str:
    """Return a kubeconfig that contains its certificates and key, so that it can be copied elsewhere."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": NETWORK,
            "contexts": [{"name": NETWORK, "context": {"cluster": NETWORK, "user": user}}],
            "clusters": [
                {
                    "name": NETWORK,
                    "cluster": {
                        "server": f"https://{addresses.api}",
                        "certificate-authority-data": _base64(layout.certificate("ca")),
                    },
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _base64(layout.certificate(user)),
                        "client-key-data": _base64(layout.key(user)),
                    },
                }
            ],
        },
        indent=1,
    )


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
