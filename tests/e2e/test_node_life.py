"""A node that pods must leave, that goes away, and that comes back: pods end, and nothing remains of their
claims.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import SLOW_S, Cluster, Json, claim_and_pod, wait_for
from tests.e2e.test_health import only

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CLAIM_FILES = 2
"""The files of one prepared claim: its record and its CDI spec."""
LEAVES_AT_ONCE: Json = {
    "key": "node.kubernetes.io/unreachable",
    "operator": "Exists",
    "effect": "NoExecute",
    "tolerationSeconds": 0,
}


def names(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["name"] for pod in cluster.get("pods", "-n", "default")["items"]}


def driver_uids(cluster: Cluster) -> set[str]:
    """Return the UIDs of the driver's pods that are not being deleted."""
    return {pod["metadata"]["uid"] for pod in cluster.staying_pods()}


def ready(cluster: Cluster) -> str:
    conditions = cluster.get("node", cluster.node)["status"]["conditions"]
    return next(one["status"] for one in conditions if one["type"] == "Ready")


@contextmanager
def tainted(cluster: Cluster, key: str) -> Iterator[None]:
    """With the taint, which Kubernetes may have set already or may take away itself."""
    cluster.kubectl("taint", "node", cluster.node, f"{key}=e2e:NoExecute", "--overwrite")
    try:
        yield
    finally:
        cluster.kubectl("taint", "node", cluster.node, f"{key}-", check=False)


@contextmanager
def without_kubelet(cluster: Cluster) -> Iterator[None]:
    cluster.local.stop("kubelet")
    try:
        yield
    finally:
        cluster.local.start("kubelet")


@contextmanager
def away(cluster: Cluster) -> Iterator[None]:
    """The node does not report while its containers run on; then it is back."""
    with without_kubelet(cluster):
        wait_for("the node to be given up", lambda: ready(cluster) == "Unknown")
        yield
    wait_for("the node to be ready", lambda: ready(cluster) == "True")


def test_pod_that_is_bound_while_the_kubelet_is_down_runs_after_its_start(cluster: Cluster) -> None:
    with without_kubelet(cluster):
        cluster.apply(claim_and_pod("early"))
        wait_for("the pod to be bound", lambda: cluster.pod("early")["spec"].get("nodeName"))
    cluster.wait_running("early", timeout_s=SLOW_S)


def test_claim_of_a_pod_that_is_deleted_while_the_kubelet_is_down_is_unprepared(cluster: Cluster) -> None:
    cluster.start("gone")
    with without_kubelet(cluster):
        cluster.kubectl("delete", "pod", "gone", "--grace-period=0", "--force")
    wait_for("the claim to be unprepared", lambda: not cluster.leftovers())


def test_a_taint_that_evicts_pods_leaves_the_driver_which_lets_them_end(cluster: Cluster) -> None:
    cluster.start("evicted")
    driver = driver_uids(cluster)
    with tainted(cluster, "example.com/leave"):
        wait_for("the pod to be gone", lambda: not names(cluster))
        assert not cluster.leftovers()
        assert driver_uids(cluster) == driver
        cluster.roll_out()
        wait_for("another instance on the tainted node", cluster.driver_has_settled)
        assert not driver_uids(cluster) & driver


def test_a_drain_ends_pods_and_a_cordon_keeps_them_away_until_it_is_lifted(cluster: Cluster) -> None:
    cluster.start("drained", selector=only(0))
    driver = driver_uids(cluster)
    cluster.kubectl("cordon", cluster.node)
    try:
        cluster.apply(claim_and_pod("waits", selector=only(1)))
        cluster.wait_unschedulable("waits")
        assert cluster.pod("drained")["status"]["phase"] == "Running"
        cluster.kubectl("drain", cluster.node, "--ignore-daemonsets", "--force", "--timeout=300s")
        assert names(cluster) == {"waits"}
        assert not cluster.leftovers()
        assert driver_uids(cluster) == driver
        cluster.roll_out()
        wait_for("another instance on the cordoned node", cluster.driver_has_settled)
    finally:
        cluster.kubectl("uncordon", cluster.node)
    cluster.wait_running("waits")


def test_a_node_that_comes_back_ends_what_was_evicted_and_keeps_the_rest(cluster: Cluster) -> None:
    leaves = claim_and_pod("leaves", selector=only(2))
    leaves[1]["spec"]["tolerations"] = [LEAVES_AT_ONCE]
    cluster.apply([*leaves, *claim_and_pod("stays", selector=only(3))])
    cluster.wait_running("leaves", "stays")
    driver = driver_uids(cluster)
    with away(cluster):
        # A control plane without contact to any node evicts nothing; in a larger cluster it sets this taint.
        with tainted(cluster, LEAVES_AT_ONCE["key"]):
            wait_for("the eviction", lambda: "deletionTimestamp" in cluster.pod("leaves")["metadata"])
        assert driver_uids(cluster) == driver
        assert len(cluster.leftovers()) == 2 * CLAIM_FILES
    wait_for("the evicted pod to be gone", lambda: names(cluster) == {"stays"})
    assert len(cluster.leftovers()) == CLAIM_FILES
    wait_for("the driver to have settled", cluster.driver_has_settled)
    [status] = cluster.pod("stays")["status"]["containerStatuses"]
    assert ("running" in status["state"], status["restartCount"]) == (True, 0)


def test_a_node_out_of_service_loses_its_pods_and_gives_their_gpu_on_when_it_is_back(
    cluster: Cluster,
) -> None:
    """The pod object is deleted while its container runs; its successor gets the same GPU after the container
    has exited.
    """
    cluster.start("lost", selector=only(4))
    driver = driver_uids(cluster)
    with away(cluster):
        with tainted(cluster, "node.kubernetes.io/out-of-service"):
            wait_for("the pod to be forgotten", lambda: not names(cluster))
            wait_for(
                "its claim to be free",
                lambda: "allocation" not in cluster.get("resourceclaim", "lost")["status"],
            )
            assert driver_uids(cluster) == driver
            assert len(cluster.leftovers()) == CLAIM_FILES
        cluster.apply(claim_and_pod("next", selector=only(4)))
    cluster.wait_running("next", timeout_s=900)
    wait_for("nothing to be left of the lost pod", lambda: len(cluster.leftovers()) == CLAIM_FILES)
    cluster.kubectl("delete", "pod", "next", "-n", "default", "--timeout=300s")
    assert not cluster.leftovers()
