"""The configuration files of the components, rendered from the layout and configs.toml."""

from __future__ import annotations

import base64
import json
import tomllib
from pathlib import Path

from localcluster import layout as places
from localcluster.components import Options, values
from localcluster.layout import API_PORT, NETWORK, Addresses, Layout, endpoint

PAUSE_IMAGE = "local/pause:1"
_USERS = ("admin", "kube-controller-manager", "kube-scheduler", "kubelet")


def write(layout: Layout, options: Options) -> None:
    """Write every file; all of them are derived, so rewriting loses nothing."""
    layout.config.mkdir(parents=True, exist_ok=True, mode=0o700)
    for user in _USERS:
        path = layout.config / f"{user}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(_kubeconfig(layout, user, options.addresses))
    known = values(layout, options) | {
        "pause_image": PAUSE_IMAGE,
        "cdi_directories": json.dumps([str(path) for path in places.CDI_DIRECTORIES]),
        "cni_plugins": places.CNI_PLUGINS,
        "network": NETWORK,
        "bridge": places.BRIDGE,
    }
    (layout.config / "cni").mkdir(exist_ok=True)
    for name, template in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        (layout.config / name).write_text(template.format(**known))


def _kubeconfig(layout: Layout, user: str, addresses: Addresses) -> str:
    """A kubeconfig with everything inside, so that it may be copied elsewhere."""
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
                        "server": f"https://{endpoint(addresses.api, API_PORT)}",
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
