"""The configuration files of the components, rendered from the layout."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from localcluster.components import Options
from localcluster.layout import (
    API_PORT,
    BRIDGE,
    CDI_DIRECTORIES,
    CNI_PLUGINS,
    KUBELET_HEALTH_PORT,
    KUBELET_PORT,
    NETWORK,
    Addresses,
    Layout,
    endpoint,
)

PAUSE_IMAGE = "local/pause:1"
_USERS = ("admin", "kube-controller-manager", "kube-scheduler", "kubelet")


def write(layout: Layout, options: Options) -> None:
    """Write every file; all of them are derived, so rewriting loses nothing."""
    layout.config.mkdir(parents=True, exist_ok=True, mode=0o700)
    for user in _USERS:
        path = layout.config / f"{user}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(_kubeconfig(layout, user, options.addresses))
    (layout.config / "kubelet.json").write_text(_kubelet(layout, options))
    (layout.config / "containerd.toml").write_text(_containerd(layout))
    cni = layout.config / "cni"
    cni.mkdir(exist_ok=True)
    (cni / "10-pods.conflist").write_text(_cni(layout, options.addresses))


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


def _kubelet(layout: Layout, options: Options) -> str:
    """Settings that let a kubelet live on any box: cgroup v1, swap, little disk.

    Image collection is off: pods use images that no registry could give back.
    """
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": options.addresses.node,
            "port": KUBELET_PORT,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": KUBELET_HEALTH_PORT,
            "tlsCertFile": str(layout.certificate("kubelet-server")),
            "tlsPrivateKeyFile": str(layout.key("kubelet-server")),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(layout.certificate("ca"))},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
            "podLogsDir": str(layout.pod_logs),
            "volumePluginDir": str(layout.volume_plugins),
            "clusterDNS": [options.addresses.dns],
            "clusterDomain": "cluster.local",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "imageGCHighThresholdPercent": 100,
            "syncFrequency": options.sync_frequency,
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
            "featureGates": dict(options.feature_gates),
        },
        indent=1,
    )


def _containerd(layout: Layout) -> str:
    """Network namespaces and runc's notes lie in our own directory, so ``down`` finds them all."""
    directories = json.dumps([str(path) for path in CDI_DIRECTORIES])
    return f"""version = 3
root = "{layout.state}/containerd"
state = "{layout.containerd_state}"

[grpc]
address = "{layout.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{layout.state}/opt"

[plugins."io.containerd.nri.v1.nri"]
disable = true

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
cdi_spec_dirs = {directories}
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
Root = "{layout.run}/runc"

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI_PLUGINS}"]
conf_dir = "{layout.config}/cni"
use_internal_loopback = true
"""


def _cni(layout: Layout, addresses: Addresses) -> str:
    """Pods reach each other and the node; nothing routes or hides them outside."""
    allocation = {
        "type": "host-local",
        "dataDir": str(layout.run / "addresses"),
        "ranges": [[{"subnet": addresses.pods, "gateway": addresses.node}]],
        "routes": [{"dst": addresses.anywhere}],
    }
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipam": allocation}
    return json.dumps({"cniVersion": "0.4.0", "name": NETWORK, "plugins": [bridge]}, indent=1)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
