"""A GPU goes bad and well again, on a real Kubernetes: taint, pod status, events, metrics, claim status."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slices import SliceCache
from tests.e2e.conftest import SIMULATOR_DIR, SLOW_S, Cluster, claim_and_pod, wait_for

# Some waits are the kubelet's, which by default tries again after a minute or more.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# A GPU that goes bad again and again is held back, so each test has one of its own.
XID, RESTART = 5, 3
SPARE = (6, 1)
TAINTED_WITHIN_S = 2.0


def only(index: int) -> str:
    """The selector of one GPU."""
    return f'device.attributes["gpu.nvidia.com"].index == {index}'


def device(cluster: Cluster, index: int) -> dict[str, Any]:
    [found] = [one for one in cluster.devices() if one["attributes"]["index"]["int"] == index]
    return found


def taints(cluster: Cluster, index: int) -> list[tuple[str, str, str]]:
    """Key, value and effect of all taints that keep pods away."""
    return taints_of(device(cluster, index))


def taints_of(published: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (one["key"], one.get("value", ""), one["effect"])
        for one in published.get("taints", [])
        if one["effect"] != "None"
    ]


def taint_by_xid_79(cluster: Cluster, index: int) -> float:
    """Make the GPU fail; return the seconds until everyone who watches the slices was notified.

    Measured from the change of the simulated machine, so that the start of programs does not count.
    """
    client = ApiClient(load_endpoint(str(cluster.local.kubeconfig())))
    slices = SliceCache(client, "gpu.nvidia.com", cluster.node)
    _, version = slices.list()
    name = device(cluster, index)["name"]
    stream = slices.open_watch(version)
    reported: list[float] = []

    def watch() -> None:
        for event in stream:
            now = time.time()
            published = event["object"].get("spec", {}).get("devices") or []
            found = [taint for one in published if one["name"] == name for taint in taints_of(one)]
            if event["type"] != "DELETED" and ("gpu.nvidia.com/xid", "79", "NoSchedule") in found:
                reported.append(now)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        cluster.simulate("recovery-action", str(index), "1")
        cluster.simulate("xid", str(index), "79")
        raised = (SIMULATOR_DIR / "machine.json").stat().st_mtime
        wait_for("the taint", lambda: reported)
    finally:
        stream.close()
        thread.join()
        client.close()
    return reported[0] - raised


def pod_health(cluster: Cluster, name: str) -> set[str]:
    """What the pod's status says of its devices."""
    return {
        resource["health"]
        for container in cluster.pod(name)["status"].get("containerStatuses", [])
        for entry in container.get("allocatedResourcesStatus", [])
        for resource in entry.get("resources", [])
    }


def reasons(cluster: Cluster, name: str) -> set[str]:
    found = cluster.get("events", "-A", "--field-selector", f"involvedObject.name={name}")["items"]
    return {event["reason"] for event in found}


def metric(cluster: Cluster, name: str) -> dict[str, float]:
    """The driver's samples of a metric, by their labels as text."""
    [driver] = cluster.staying_pods("node")
    url = f"http://{driver['status']['podIP']}:8080/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line.startswith(name + "{")]
    return {labels: float(value) for labels, value in rows}


def severity(cluster: Cluster) -> float:
    """The GPU's severity by the driver's metrics; -1 while there is none."""
    uuid = device(cluster, XID)["attributes"]["uuid"]["string"]
    found = metric(cluster, "nvidia_dra_gpu_severity")
    return next((value for labels, value in found.items() if uuid in labels), -1.0)


@pytest.fixture
def healthy(cluster: Cluster) -> Iterator[Cluster]:
    """The GPU is well before and after."""
    wait_for("an untainted GPU", lambda: not taints(cluster, XID))
    yield cluster
    cluster.simulate("reset", str(XID), "--force")
    wait_for("the GPU to be well again", lambda: not taints(cluster, XID))


def test_an_xid_is_reported_everywhere_and_so_is_recovery(healthy: Cluster) -> None:
    healthy.start("victim", selector=only(XID))
    wait_for("the pod's device to be healthy", lambda: pod_health(healthy, "victim") == {"Healthy"})
    took = [taint_by_xid_79(healthy, XID)]
    assert ("gpu.nvidia.com/xid", "79", "NoSchedule") in taints(healthy, XID)
    wait_for("the pod's device to be unhealthy", lambda: pod_health(healthy, "victim") == {"Unhealthy"})
    wait_for("an event on the claim", lambda: "GPUUnhealthy" in reasons(healthy, "victim"))
    wait_for("an event on the node", lambda: "GPUUnhealthy" in reasons(healthy, healthy.node))
    wait_for("the metric of severity", lambda: severity(healthy) >= 3)
    wait_for(
        "the metric of Xids",
        lambda: any('xid="79"' in labels for labels in metric(healthy, "nvidia_dra_gpu_xids_total")),
    )
    assert healthy.pod("victim")["status"]["phase"] == "Running"

    for index in SPARE:
        if min(took) > TAINTED_WITHIN_S:  # the machine may have been busy with something else
            took.append(taint_by_xid_79(healthy, index))
            healthy.simulate("reset", str(index), "--force")
            wait_for("no taint", lambda index=index: not taints(healthy, index))
    print("tainted after " + ", ".join(f"{seconds:.2f}" for seconds in took) + " s")
    assert min(took) <= TAINTED_WITHIN_S, took

    healthy.apply(claim_and_pod("wants-it", selector=only(XID)))
    healthy.start(*(f"other-{number}" for number in range(7)))
    healthy.wait_unschedulable("wants-it")

    healthy.simulate("reset", str(XID), "--force")
    wait_for("no taint", lambda: not taints(healthy, XID))
    wait_for("the pod's device to be healthy again", lambda: pod_health(healthy, "victim") == {"Healthy"})
    wait_for("the metric of severity to fall", lambda: severity(healthy) == 0)
    wait_for("an event of recovery", lambda: "GPURecovered" in reasons(healthy, "victim"))
    healthy.kubectl("delete", "pod/victim", "resourceclaim/victim")
    healthy.wait_running("wants-it", timeout_s=SLOW_S)


def test_claim_status_is_there_while_it_is_allocated(cluster: Cluster) -> None:
    cluster.start("told")

    def status() -> list[dict[str, Any]]:
        return cluster.get("resourceclaim", "told")["status"].get("devices", [])

    [entry] = wait_for("the claim's status", status)
    assert entry["data"]["uuid"] == cluster.seen_by("told")[0]
    assert entry["data"]["driverVersion"]
    assert [(one["type"], one["status"]) for one in entry["conditions"]] == [("Ready", "True")]
    cluster.kubectl("delete", "pod/told")
    wait_for("the claim's status to be gone", lambda: not status())
