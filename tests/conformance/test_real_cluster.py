"""What only a real kubelet, scheduler and API server show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import (
    DAEMONSET,
    NAMESPACE,
    SLOW_S,
    Cluster,
    Json,
    claim_template,
    container,
    pod,
    pods_of,
    wait_for,
)
from tests.e2e.test_slices import versions

pytestmark = pytest.mark.cluster

Example = Callable[[str], None]
AWAY = "conformance/away"
GPUS = 8


def user(name: str) -> list[Json]:
    """A pod with a claim of its template, and the template."""
    return [claim_template(name), *pods_of(name, name)]


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


def test_c02_pod_created_while_the_kubelet_is_down(cluster: Cluster) -> None:
    """A pod that was bound while the kubelet was down runs after it is up."""
    cluster.local.stop("kubelet")
    try:
        cluster.apply(user("early"))
        wait_for("the pod to be bound", lambda: cluster.pod("early")["spec"].get("nodeName"))
    finally:
        cluster.local.start("kubelet")
    cluster.wait_running("early", timeout_s=SLOW_S)


@pytest.mark.timeout(1800)
def test_c04_pod_deleted_while_the_kubelet_is_down(cluster: Cluster) -> None:
    """The claim of a pod that went away meanwhile is unprepared by the next kubelet."""
    cluster.apply(user("gone"))
    cluster.wait_running("gone")
    assert cluster.leftovers()
    cluster.local.stop("kubelet")
    try:
        cluster.kubectl("delete", "pod", "gone", "--grace-period=0", "--force")
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
    cluster.roll_out()
    assert versions(cluster) == before


def test_c14_all_kinds_of_containers(cluster: Cluster) -> None:
    """Init containers and sidecars see the claim; one that no container uses is prepared as well."""
    once = container("first", "gpu", command="nvidia-smi -L")
    sidecar = container("sidecar", "gpu", restartPolicy="Always")
    claims = [{"name": name, "resourceClaimTemplateName": "kinds"} for name in ("gpu", "unused")]
    kinds = pod("kinds", container("main", "gpu"), initContainers=[once, sidecar], resourceClaims=claims)
    cluster.apply([claim_template("kinds"), kinds])
    cluster.wait_running("kinds")
    seen = [cluster.seen_by("kinds", name) for name in ("first", "sidecar", "main")]
    assert len(seen[0]) == 1
    assert seen[0] == seen[1] == seen[2]
    assert len(cluster.leftovers()) == 4, "record and spec of both claims"


@pytest.mark.timeout(1800)
def test_c17_driver_starts_after_the_pod(cluster: Cluster, without_driver: Callable[[], None]) -> None:
    """A pod that was created while there was no plugin runs once there is one."""
    cluster.apply(user("patient"))
    wait_for("the pod to be there", lambda: cluster.pod("patient")["status"]["phase"] == "Pending")
    without_driver()
    cluster.wait_running("patient", timeout_s=SLOW_S)
