"""The playground's scheduler: what it writes of what the allocator chooses (tests/cli/validation/test_allocator.py)."""

from __future__ import annotations

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import AllocationError, PlaygroundScheduler

GROUP = "resource.k8s.io"
DRIVER = "gpu.nvidia.com"


@pytest.fixture
def server():
    server = PlaygroundApiServer()
    spec = {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]}
    server.add("deviceclasses", {"metadata": {"name": DRIVER}, "spec": spec}, group=GROUP)
    return server


@pytest.fixture
def scheduler(server):
    return PlaygroundScheduler(server)


def publish(server, *names, node="n1", **fields):
    devices = [{"name": name, **fields} for name in names]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    server.add("resourceslices", {"metadata": {"name": node}, "spec": spec}, group=GROUP)


def request(**fields):
    return {"name": "gpu", "exactly": {"deviceClassName": DRIVER, **fields}}


def claim(server, name, **fields):
    spec = {"devices": {"requests": [request(**fields)]}}
    server.add(
        "resourceclaims", {"metadata": {"name": name, "namespace": "default"}, "spec": spec}, group=GROUP
    )


def test_pod_gets_claims_from_templates_on_one_node(server, scheduler):
    publish(server, "gpu-0", node="n1")
    publish(server, "gpu-0", "gpu-1", node="n2")
    template = {"spec": {"devices": {"requests": [request()]}}, "metadata": {"labels": {"x": "y"}}}
    server.add(
        "resourceclaimtemplates",
        {"metadata": {"name": "t", "namespace": "default"}, "spec": template},
        group=GROUP,
    )
    entries = [{"name": n, "resourceClaimTemplateName": "t"} for n in ("one", "two")]
    server.add(
        "pods", {"metadata": {"name": "p", "namespace": "default"}, "spec": {"resourceClaims": entries}}
    )
    pod = scheduler.schedule_pod("default", "p")
    assert pod["spec"]["nodeName"] == "n2"
    claims = server.objects("resourceclaims")
    statuses = {s["name"]: s["resourceClaimName"] for s in pod["status"]["resourceClaimStatuses"]}
    assert sorted(statuses.values()) == [c["metadata"]["name"] for c in claims]
    assert statuses["one"].startswith("p-one-")
    for stored in claims:
        assert stored["metadata"]["labels"] == {"x": "y"}
        assert stored["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
        assert stored["status"]["reservedFor"] == [
            {"resource": "pods", "name": "p", "uid": pod["metadata"]["uid"]}
        ]
    assert scheduler.schedule_pod("default", "p")["spec"]["nodeName"] == "n2"
    assert len(server.objects("resourceclaims")) == 2


def test_dropped_gate_makes_the_device_exclusive():
    server = PlaygroundApiServer(gates={"DRAConsumableCapacity": False})
    scheduler = PlaygroundScheduler(server)
    server.add("deviceclasses", {"metadata": {"name": DRIVER}, "spec": {}}, group=GROUP)
    publish(server, "gpu-0", allowMultipleAllocations=True, capacity={"memory": {"value": "8Gi"}})
    for name in ("c", "d"):
        claim(server, name, capacity={"requests": {"memory": "1Gi"}})
    [result] = scheduler.allocate_claim("default", "c")["status"]["allocation"]["devices"]["results"]
    assert "shareID" not in result
    assert "capacity" not in server.objects("resourceclaims")[0]["spec"]["devices"]["requests"][0]["exactly"]
    with pytest.raises(AllocationError):
        scheduler.allocate_claim("default", "d")
    assert "status" not in server.objects("resourceclaims")[1]
