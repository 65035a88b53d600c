"""A MIG layout that changes under running claims, on a real Kubernetes with a simulated DGX H100."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import DAEMONSET, NAMESPACE, Cluster, claim_and_pod, wait_for

pytestmark = pytest.mark.cluster

LABEL = "nvidia.com/mig.config"
HELD, FREE = "0000:1b:00.0", "0000:43:00.0"
CONFIG = """
migLayouts:
  fromLabel: true
  configuration:
    version: v1
    mig-configs:
      two-cut:
        - devices: [0, 1]
          mig-enabled: true
          mig-devices: {"3g.40gb": 1, "1g.10gb": 3}
        - devices: [2, 3, 4, 5, 6, 7]
          mig-enabled: false
"""
READS_IT = {
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "driver",
                        "env": [{"name": "CONFIG_FILE", "value": "/etc/gpu-dra-driver/config.yaml"}],
                        "volumeMounts": [{"name": "config", "mountPath": "/etc/gpu-dra-driver"}],
                    }
                ],
                "volumes": [{"name": "config", "configMap": {"name": "layouts"}}],
            }
        }
    }
}

RBAC = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "layouts"}}
# What the chart grants with the value migLayouts.
MAY_WATCH_NODES = [
    RBAC
    | {
        "kind": "ClusterRole",
        "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}],
    },
    RBAC
    | {
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "layouts"},
        "subjects": [{"kind": "ServiceAccount", "name": "gpu-dra-driver", "namespace": NAMESPACE}],
    },
]


@pytest.fixture
def layouts(cluster: Cluster) -> Iterator[Cluster]:
    """The plugin takes its layout from the node's label; afterwards the plain one again, with whole GPUs."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "layouts", "namespace": NAMESPACE},
    }
    cluster.apply([config | {"data": {"config.yaml": CONFIG}}, *MAY_WATCH_NODES])
    cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "--patch", json.dumps(READS_IT))
    cluster.rolled_out()
    wait_for("the plugin to have settled", cluster.driver_has_settled)
    try:
        yield cluster
    finally:
        label(cluster, "all-disabled")
        cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=300s")
        wait_for("whole GPUs", lambda: [by_address(cluster, one) for one in (HELD, FREE)] == [["gpu"]] * 2)
        cluster.kubectl("label", "node", cluster.node, f"{LABEL}-")
        cluster.kubectl("rollout", "undo", DAEMONSET, "-n", NAMESPACE)
        cluster.rolled_out()
        wait_for("the plugin to have settled", cluster.driver_has_settled)
        cluster.delete([config, *MAY_WATCH_NODES])


def label(cluster: Cluster, layout: str) -> None:
    cluster.kubectl("label", "node", cluster.node, "--overwrite", f"{LABEL}={layout}")


def at(address: str) -> str:
    return f'device.attributes["resource.kubernetes.io"].pciBusID == "{address}"'


def small(address: str) -> dict[str, Any]:
    chosen = f'{at(address)} && device.attributes["gpu.nvidia.com"].profile == "1g.10gb"'
    return {"device_class": "mig.nvidia.com", "selector": chosen}


def devices_at(cluster: Cluster, address: str) -> list[dict[str, Any]]:
    name = "resource.kubernetes.io/pciBusID"
    return [one for one in cluster.devices() if one["attributes"][name]["string"] == address]


def by_address(cluster: Cluster, address: str) -> list[str]:
    """The profiles of the MIG devices of a GPU, or `gpu` if it is whole."""
    attributes = [one["attributes"] for one in devices_at(cluster, address)]
    return sorted(one.get("profile", one["type"])["string"] for one in attributes)


CUT = ["1g.10gb", "1g.10gb", "1g.10gb", "3g.40gb"]


def test_gpus_change_as_they_run_empty_and_claims_that_wait_start(layouts: Cluster) -> None:
    cluster = layouts
    cluster.start("held", selector=at(HELD))
    before, seen = cluster.pod("held"), cluster.seen_by("held")
    cluster.apply(claim_and_pod("early", **small(FREE)))
    cluster.wait_unschedulable("early")

    label(cluster, "two-cut")
    # The idle GPU is cut, and the claim that waits for a part of it starts.
    cluster.wait_running("early")
    assert by_address(cluster, FREE) == CUT
    # The other one keeps its claim, and takes no new one.
    [whole] = wait_for("the taint", lambda: [one for one in devices_at(cluster, HELD) if one.get("taints")])
    assert [(one["key"], one["effect"]) for one in whole["taints"]] == [
        ("gpu.nvidia.com/mig-layout", "NoSchedule")
    ]
    cluster.apply(claim_and_pod("late", **small(HELD)))
    cluster.wait_unschedulable("late")
    now = cluster.pod("held")
    assert (now["metadata"]["uid"], now["status"]["phase"]) == (before["metadata"]["uid"], "Running")
    assert now["status"]["containerStatuses"][0]["restartCount"] == 0
    assert cluster.seen_by("held") == seen
    assert waits(cluster)

    # Its pod ends: it is cut too, and the claim that waits for a part of it starts.
    cluster.kubectl("delete", "pod/held", "resourceclaim/held", "--timeout=300s")
    cluster.wait_running("late")
    assert by_address(cluster, HELD) == CUT

    # The label flips back: what is held stays as it is.
    early = cluster.seen_by("early")
    cluster.kubectl("delete", "pod/late", "resourceclaim/late", "--timeout=300s")
    label(cluster, "all-disabled")
    wait_for("a whole GPU", lambda: by_address(cluster, HELD) == ["gpu"])
    assert by_address(cluster, FREE) == CUT
    assert cluster.seen_by("early") == early
    assert cluster.pod("early")["status"]["phase"] == "Running"


def waits(cluster: Cluster) -> list[str]:
    """What the events of the node say of a layout that waits."""
    found = cluster.get("events", "-A", "--field-selector", f"involvedObject.name={cluster.node}")["items"]
    return [event["message"] for event in found if event["reason"] == "MigLayoutWaits"]
