"""While no driver runs on a node, the health of its devices is unknown, and the status of pods shows this."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import DAEMONSET, NAMESPACE, SLOW_S, Cluster, Json, claim_and_pod, wait_for
from tests.e2e.test_health import pod_health

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NOWHERE = "gpu-dra-driver.e2e/no-node-has-this"
# The kubelet forgets a driver's devices when their health stream ends, but does not update pods: its periodic
# sync does, at the interval that hack/e2e.py sets.
SHOWN_S = 300.0


def driver_pods(cluster: Cluster) -> list[Json]:
    return cluster.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=node")["items"]


def choose_nodes(cluster: Cluster, value: str | None) -> None:
    """Have the driver run on nodes with a label that none has, or with None where it ran before."""
    patch = {"spec": {"template": {"spec": {"nodeSelector": {NOWHERE: value}}}}}
    cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", json.dumps(patch))


def stop(cluster: Cluster) -> None:
    choose_nodes(cluster, "true")
    wait_for("the driver's pod to be gone", lambda: not driver_pods(cluster), 300)


def start(cluster: Cluster) -> None:
    choose_nodes(cluster, None)
    wait_for("one pod of the driver", lambda: len(driver_pods(cluster)) == 1, 300)
    cluster.rolled_out()
    wait_for("the driver to be ready", cluster.driver_is_ready, 300)


@pytest.fixture
def stoppable(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose driver runs again afterwards and publishes what it did; the kubelet deletes the slices of a
    driver that is away."""
    before = cluster.devices()
    yield cluster
    start(cluster)
    wait_for("the devices to be published again", lambda: cluster.devices() == before, 300)


def test_health_is_unknown_without_a_driver_and_reported_when_it_is_back(stoppable: Cluster) -> None:
    stoppable.start("watched")
    wait_for("the device to be healthy", lambda: pod_health(stoppable, "watched") == {"Healthy"}, SHOWN_S)
    stop(stoppable)
    wait_for("its health to be unknown", lambda: pod_health(stoppable, "watched") == {"Unknown"}, SHOWN_S)
    status = stoppable.pod("watched")["status"]
    assert (status["phase"], status["containerStatuses"][0]["restartCount"]) == ("Running", 0)
    start(stoppable)
    wait_for("it to be healthy again", lambda: pod_health(stoppable, "watched") == {"Healthy"}, SHOWN_S)
    [container] = stoppable.pod("watched")["status"]["containerStatuses"]
    assert container["restartCount"] == 0
    assert len(stoppable.seen_by("watched")) == 1
    stoppable.kubectl("delete", "pod", "watched", "-n", "default", "--timeout=300s")
    wait_for("the claim to be unprepared by the new instance", lambda: not stoppable.leftovers(), 300)


def test_pod_that_is_created_while_no_driver_runs_starts_with_the_driver(stoppable: Cluster) -> None:
    """The kubelet deletes the slices of a driver that stays away, and the next one publishes them again."""
    stop(stoppable)
    wait_for("the slices to be removed", lambda: not stoppable.slices())
    stoppable.apply(claim_and_pod("patient"))
    start(stoppable)
    stoppable.wait_running("patient", timeout_s=SLOW_S)


def test_the_kubelet_reads_health_in_the_newest_version_that_it_knows(stoppable: Cluster) -> None:
    """v1alpha1 until 1.36, v1 since 1.37; a debug log has each call."""
    release = stoppable.get("node", stoppable.node)["status"]["nodeInfo"]["kubeletVersion"]
    version = "v1" if int(release.split(".")[1]) >= 37 else "v1alpha1"
    stoppable.kubectl("set", "env", DAEMONSET, "-n", NAMESPACE, "LOG_LEVEL=debug")
    try:
        stoppable.rolled_out()
        wait_for("the driver to have settled", stoppable.driver_has_settled)

        def streams() -> set[str]:
            [pod] = stoppable.staying_pods("node")
            lines = stoppable.logs(pod["metadata"]["name"], NAMESPACE).splitlines()
            events = [json.loads(line) for line in lines if '"stream_opened"' in line]
            return {event["method"] for event in events}

        assert wait_for("a stream of health", streams) == {f"{version}.DRAResourceHealth/NodeWatchResources"}
    finally:
        stoppable.kubectl("set", "env", DAEMONSET, "-n", NAMESPACE, "LOG_LEVEL-")
