"""What the driver publishes in a real API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.model.sharing import NO_SHARING, share_all
from dra_driver.simulator import machine_names
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.e2e.conftest import SLOW_S, Cluster, Json
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import DRIVER
from tests.sharing.test_modes import RULES

pytestmark = [pytest.mark.cluster, pytest.mark.core]


def versions(cluster: Cluster) -> dict[str, str]:
    return {entry["metadata"]["name"]: entry["metadata"]["resourceVersion"] for entry in cluster.slices()}


def test_slices_equal_what_inspect_prints(cluster: Cluster) -> None:
    published = cluster.slices()
    expected = cluster.inspect()

    def content(entry: dict) -> dict:
        spec = dict(entry["spec"])
        return {**spec, "pool": {**spec["pool"], "generation": 0}}

    assert [content(entry) for entry in published] == [content(entry) for entry in expected]


@pytest.mark.parametrize("machine", machine_names())
def test_the_api_server_takes_the_slices_of_every_machine(
    cluster: Cluster, machine: str, tmp_path: Path
) -> None:
    """Plain, with MIG devices on demand, and with each sharing rule. Dropped fields belong to features that
    are off before 1.36.
    """
    _, version = cluster.request("GET", "/version")
    keeps_all = int(json.loads(version)["minor"]) >= 36
    path = "/apis/resource.k8s.io/v1/resourceslices?dryRun=All"
    with structlog.testing.capture_logs():
        entries = list(slices_of(machine, tmp_path))
    for entry in entries:
        status, body = cluster.request("POST", path, entry)
        assert status == 201, body.decode()
        if keeps_all:
            assert json.loads(body)["spec"] == entry["spec"]


def slices_of(machine: str, directory: Path) -> Iterator[Json]:
    """What the driver creates on a simulated machine, in each of its forms."""
    for on_demand in (False, True):
        node = SimulatedNode(machine, directory / str(on_demand), (lambda _gpu: True) if on_demand else None)
        known = node.discover()
        if on_demand:
            for number, gpu in enumerate(known.gpus):
                if gpu.mig_capable:
                    node.machine.set_mig_mode(number, True)  # A100 and A30 offer nothing else before
            known = node.discover()
        node.close()
        for sharing in (NO_SHARING, *map(share_all, RULES.values())):
            changes = slice_changes(build_pool(known, "node", sharing), (), Owner(DRIVER, "node", "uid"))
            yield from changes.creates


def test_slices_belong_to_the_node_object(cluster: Cluster) -> None:
    node = cluster.get("node", cluster.node)
    for entry in cluster.slices():
        assert entry["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "name": cluster.node,
                "uid": node["metadata"]["uid"],
                "controller": True,
            }
        ]
        assert entry["metadata"]["name"].startswith("00000-gpu.nvidia.com-")


def test_kubelet_restart_wipes_the_slices_and_they_come_back_at_once(cluster: Cluster, example) -> None:
    example("one-gpu")
    cluster.wait_running("one-gpu")
    started_at = cluster.pod("one-gpu")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    uids = {entry["metadata"]["uid"] for entry in cluster.slices()}
    with closing(ApiClient(load_endpoint(str(cluster.local.kubeconfig())))) as client:
        cluster.local.restart("kubelet")
        print(f"without devices for {gap_in(client, uids):.2f} s")
    container = cluster.pod("one-gpu")["status"]["containerStatuses"][0]
    assert container["state"]["running"]["startedAt"] == started_at
    assert container["restartCount"] == 0


def gap_in(client: ApiClient, uids: set[str]) -> float:
    """The seconds without devices until a kubelet that starts has wiped the slices `uids` and there are others."""
    gone_since: float | None = None
    deadline = time.monotonic() + SLOW_S
    while time.monotonic() < deadline:
        answer = client.request("GET", "/apis/resource.k8s.io/v1/resourceslices", action="list slices")
        now = time.monotonic()
        slices = [entry for entry in answer["items"] if entry["spec"].get("devices")]
        if not slices and gone_since is None:
            gone_since = now
        if slices and not uids & {entry["metadata"]["uid"] for entry in slices}:
            # Without a gap they were missing for less than one poll.
            return now - gone_since if gone_since is not None else 0.0
        time.sleep(0.01)
    pytest.fail("the restarted kubelet did not wipe the slices, or they did not come back")
