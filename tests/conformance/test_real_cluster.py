"""What only a real kubelet, scheduler and API server show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import NAMESPACE, SLOW_S, Cluster, wait_for
from tests.e2e.test_permissions import VERSIONS, a_slice, denied

pytestmark = pytest.mark.cluster

Example = Callable[[str], None]
DAEMONSET = "daemonset/gpu-dra-driver"
IMAGE = "docker.io/library/ubuntu:22.04"
AWAY = "conformance/away"
GPUS = 8

TEMPLATE = """apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {name}}}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly: {{deviceClassName: gpu.nvidia.com, count: {count}}}
---
"""

POD = """apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: {image}
      command: [sh, -c, "nvidia-smi -L; exec sleep 3600"]
      resources: {{claims: [{{name: gpu}}]}}
  resourceClaims:
    - {{name: gpu, resourceClaimTemplateName: {template}}}
---
"""


def template(name: str, count: int = 1) -> str:
    return TEMPLATE.format(name=name, count=count)


def pod(name: str, template_name: str) -> str:
    return POD.format(name=name, template=template_name, image=IMAGE)


def versions(cluster: Cluster) -> dict[str, str]:
    return {
        entry["metadata"]["name"]: entry["metadata"]["resourceVersion"] + entry["metadata"]["uid"]
        for entry in cluster.slices()
    }


def force_delete(cluster: Cluster, *names: str) -> None:
    cluster.kubectl("delete", "pod", *names, "--grace-period=0", "--force")


@pytest.fixture
def without_driver(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Takes the driver off the node by a selector that no node has; the call returned puts it back."""

    def select(value: str | None) -> None:
        patch = {"spec": {"template": {"spec": {"nodeSelector": {AWAY: value}}}}}
        cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", json.dumps(patch))

    def back() -> None:
        select(None)
        wait_for("the driver to be back", lambda: cluster.driver_has_settled() and cluster.devices())

    select("yes")
    wait_for("the driver's pods to be gone", lambda: not cluster.driver_pods())
    yield back
    back()


def test_c01_kubelet_restart(cluster: Cluster) -> None:
    """A kubelet that starts anew finds the driver, and pods start."""
    cluster.local.restart("kubelet")
    cluster.apply(template("after") + pod("after", "after"))
    cluster.wait_running("after", timeout_s=SLOW_S)


def test_c02_pod_created_while_the_kubelet_is_down(cluster: Cluster) -> None:
    """A pod that was bound while the kubelet was down runs after it is up."""
    cluster.local.stop("kubelet")
    try:
        cluster.apply(template("early") + pod("early", "early"))
        wait_for("the pod to be bound", lambda: cluster.pod("early")["spec"].get("nodeName"))
    finally:
        cluster.local.start("kubelet")
    cluster.wait_running("early", timeout_s=SLOW_S)


@pytest.mark.timeout(1800)
def test_c04_pod_deleted_while_the_kubelet_is_down(cluster: Cluster) -> None:
    """The claim of a pod that went away meanwhile is unprepared by the next kubelet."""
    cluster.apply(template("gone") + pod("gone", "gone"))
    cluster.wait_running("gone")
    assert cluster.leftovers()
    cluster.local.stop("kubelet")
    try:
        force_delete(cluster, "gone")
    finally:
        cluster.local.start("kubelet")
    wait_for("the claim to be unprepared", lambda: not cluster.leftovers())


def test_c08_metric_of_claims_in_use(cluster: Cluster, example: Example) -> None:
    """The kubelet counts the claims that it prepared with us."""
    example("one-gpu")
    cluster.wait_running("one-gpu")

    def in_use() -> float:
        text = cluster.kubectl("get", "--raw", f"/api/v1/nodes/{cluster.node}/proxy/metrics")
        found = re.findall(r'^dra_resource_claims_in_use\{driver_name="gpu.nvidia.com"\} (\S+)', text, re.M)
        return float(found[0]) if found else 0.0

    wait_for("one claim in use", lambda: in_use() == 1)
    cluster.kubectl("delete", "pod", "one-gpu")
    wait_for("no claim in use", lambda: in_use() == 0)


@pytest.mark.timeout(1800)
def test_c09_slices_over_the_life_of_the_plugin(cluster: Cluster, without_driver: Callable[[], None]) -> None:
    """Slices of a plugin that stays away are removed; those of one that comes back quickly are not touched."""
    wait_for("the slices to be removed", lambda: not cluster.slices())
    without_driver()
    assert len(cluster.devices()) >= GPUS
    before = versions(cluster)
    cluster.kubectl("rollout", "restart", DAEMONSET, "-n", NAMESPACE)
    cluster.kubectl("rollout", "status", DAEMONSET, "-n", NAMESPACE, "--timeout=300s")
    assert versions(cluster) == before


def test_c10_health_in_the_pods_status(cluster: Cluster, example: Example) -> None:
    """The kubelet shows the health of a pod's device."""
    example("one-gpu")
    cluster.wait_running("one-gpu")

    def shown() -> set[str]:
        return {
            resource["health"]
            for container in cluster.pod("one-gpu")["status"].get("containerStatuses", [])
            for entry in container.get("allocatedResourcesStatus", [])
            for resource in entry.get("resources", [])
        }

    wait_for("the device to be healthy", lambda: shown() == {"Healthy"})


@pytest.mark.timeout(1800)
def test_c12_force_deleted_pod(cluster: Cluster) -> None:
    """Claims of a force-deleted pod are unprepared, and a pod that needs the same devices runs after that."""
    cluster.apply(template("all", GPUS) + pod("old", "all"))
    cluster.wait_running("old")
    force_delete(cluster, "old")
    cluster.apply(pod("new", "all"))
    cluster.wait_running("new", timeout_s=SLOW_S)
    assert len(set(cluster.seen_by("new"))) == GPUS
    assert len(cluster.leftovers()) == 2, "a record and a spec of the new claim"


def test_c14_all_kinds_of_containers(cluster: Cluster) -> None:
    """Init containers and sidecars see the claim; one that no container uses is prepared as well."""
    manifest = f"""apiVersion: v1
kind: Pod
metadata: {{name: kinds}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  initContainers:
    - name: first
      image: {IMAGE}
      command: [sh, -c, "nvidia-smi -L"]
      resources: {{claims: [{{name: gpu}}]}}
    - name: sidecar
      image: {IMAGE}
      restartPolicy: Always
      command: [sh, -c, "nvidia-smi -L; exec sleep 3600"]
      resources: {{claims: [{{name: gpu}}]}}
  containers:
    - name: main
      image: {IMAGE}
      command: [sh, -c, "nvidia-smi -L; exec sleep 3600"]
      resources: {{claims: [{{name: gpu}}]}}
  resourceClaims:
    - {{name: gpu, resourceClaimTemplateName: kinds}}
    - {{name: unused, resourceClaimTemplateName: kinds}}
"""
    cluster.apply(template("kinds") + manifest)
    cluster.wait_running("kinds")
    seen = [cluster.seen_by("kinds", name) for name in ("first", "sidecar", "main")]
    assert len(seen[0]) == 1
    assert seen[0] == seen[1] == seen[2]
    assert len(cluster.leftovers()) == 4, "record and spec of both claims"


@pytest.mark.timeout(1800)
def test_c16_rolling_update_while_pods_come(cluster: Cluster) -> None:
    """Pods that come during an update run, those that were there go on, and the slices are as before."""
    cluster.apply(template("update") + pod("before", "update"))
    cluster.wait_running("before")
    published = versions(cluster)
    cluster.kubectl("rollout", "restart", DAEMONSET, "-n", NAMESPACE)
    for number in range(4):
        cluster.apply(pod(f"during-{number}", "update"))
        cluster.wait_running(f"during-{number}")
    cluster.kubectl("rollout", "status", DAEMONSET, "-n", NAMESPACE, "--timeout=300s")
    assert versions(cluster) == published
    assert cluster.pod("before")["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.timeout(1800)
def test_c17_driver_starts_after_the_pod(cluster: Cluster, without_driver: Callable[[], None]) -> None:
    """A pod that was created while there was no driver runs once there is one."""
    cluster.apply(template("patient") + pod("patient", "patient"))
    wait_for("the pod to be there", lambda: cluster.pod("patient")["status"]["phase"] == "Pending")
    without_driver()
    cluster.wait_running("patient", timeout_s=SLOW_S)


def test_c18_device_status_of_claims(cluster: Cluster, example: Example) -> None:
    """The API server keeps our entry of a claim's status: the device, its data, and that it is ready."""
    example("one-gpu")
    cluster.wait_running("one-gpu")
    [claim] = cluster.claims_of("one-gpu")
    [entry] = wait_for("the status", lambda: cluster.get("resourceclaim", claim)["status"].get("devices"))
    assert (entry["driver"], entry["pool"]) == ("gpu.nvidia.com", cluster.node)
    assert {one["type"]: one["status"] for one in entry["conditions"]}["Ready"] == "True"
    assert cluster.allocated(claim)[0] in json.dumps(entry["data"])


@pytest.mark.parametrize("version", VERSIONS)
def test_c19_only_the_own_node(cluster: Cluster, version: str) -> None:
    """The driver's token writes slices of its node, and neither another node's nor those of the whole cluster."""
    name = cluster.staying_pods("node")[-1]["metadata"]["name"]
    bound = ["--bound-object-kind", "Pod", "--bound-object-name", name]
    token = cluster.kubectl("create", "token", "gpu-dra-driver", "-n", NAMESPACE, *bound).strip()
    own = a_slice(version, "own", pool=cluster.node, where={"nodeName": cluster.node})
    assert not denied(cluster, token, own)
    assert denied(cluster, token, a_slice(version, "other", pool="other", where={"nodeName": "other"}))
    assert denied(cluster, token, a_slice(version, "all", pool="all", where={"allNodes": True}))


def test_c21_extended_resource_and_admin_access(cluster: Cluster, example: Example) -> None:
    """A limit in the pod is enough to get a GPU, and admin access sees all of them meanwhile."""
    example("extended-resource")
    cluster.wait_running("extended-resource")
    assert len(cluster.seen_by("extended-resource")) == 1
    example("admin-access")
    cluster.wait_running("gpu-monitor", namespace="gpu-monitoring")
    assert len(set(cluster.seen_by("gpu-monitor", namespace="gpu-monitoring"))) == GPUS
    cluster.kubectl("delete", "-f", "examples/admin-access", "--timeout=300s")
