"""The playground's scheduler: what it allocates, what it writes, what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import AllocationError, PlaygroundScheduler

GROUP = "resource.k8s.io"
DRIVER = "gpu.nvidia.com"
IS_GPU = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"


@pytest.fixture
def server():
    server = PlaygroundApiServer()
    config = [{"opaque": {"driver": DRIVER, "parameters": {"from": "class"}}}]
    spec = {"selectors": [{"cel": {"expression": IS_GPU}}], "config": config}
    server.add("deviceclasses", {"metadata": {"name": DRIVER}, "spec": spec}, group=GROUP)
    return server


@pytest.fixture
def scheduler(server):
    return PlaygroundScheduler(server)


def gpu(index, **fields):
    attributes = {
        "type": {"string": "gpu"},
        "index": {"int": index},
        "nvlinkDomain": {"string": f"d{index // 2}"},
    }
    return {"name": f"gpu-{index}", "attributes": attributes} | fields


def publish(server, devices, *, node="n1", pool=None, generation=1, count=1, name="s-0", **spec):
    full = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": pool or node, "generation": generation, "resourceSliceCount": count},
        **({"devices": devices} if devices else {}),
        **spec,
    }
    server.add("resourceslices", {"metadata": {"name": f"{node}-{name}"}, "spec": full}, group=GROUP)


def claim(server, name, *requests, **devices):
    spec = {"devices": {"requests": list(requests), **devices}}
    server.add(
        "resourceclaims", {"metadata": {"name": name, "namespace": "default"}, "spec": spec}, group=GROUP
    )


def request(name="gpu", **fields):
    return {"name": name, "exactly": {"deviceClassName": DRIVER, **fields}}


def picked(stored):
    return [(r["request"], r["device"]) for r in stored["status"]["allocation"]["devices"]["results"]]


def test_first_free_device_is_allocated_with_config_and_node(server, scheduler):
    publish(server, [gpu(0), gpu(1)])
    own = {"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": {"from": "claim"}}}
    claim(server, "c", request(), config=[own])
    allocation = scheduler.allocate_claim("default", "c")["status"]["allocation"]
    assert allocation["devices"]["results"] == [
        {"request": "gpu", "driver": DRIVER, "pool": "n1", "device": "gpu-0"}
    ]
    assert allocation["devices"]["config"] == [
        {
            "source": "FromClass",
            "requests": ["gpu"],
            "opaque": {"driver": DRIVER, "parameters": {"from": "class"}},
        },
        {"source": "FromClaim", **own},
    ]
    term = allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]
    assert term == {"key": "metadata.name", "operator": "In", "values": ["n1"]}


def test_taken_device_is_not_given_again(server, scheduler):
    publish(server, [gpu(0), gpu(1)])
    for name in ("a", "b", "c"):
        claim(server, name, request())
    assert picked(scheduler.allocate_claim("default", "a")) == [("gpu", "gpu-0")]
    assert picked(scheduler.allocate_claim("default", "b")) == [("gpu", "gpu-1")]
    with pytest.raises(AllocationError, match="no devices on node n1 fit requests gpu"):
        scheduler.allocate_claim("default", "c")
    scheduler.release_claim("default", "a")
    assert picked(scheduler.allocate_claim("default", "c")) == [("gpu", "gpu-0")]


def test_allocating_twice_is_allocating_once(server, scheduler):
    publish(server, [gpu(0)])
    claim(server, "c", request())
    first = scheduler.allocate_claim("default", "c")
    assert scheduler.allocate_claim("default", "c") == first


def test_match_attribute_moves_the_choice(server, scheduler):
    publish(server, [gpu(i) for i in range(4)])
    claim(server, "one", request())
    scheduler.allocate_claim("default", "one")
    together = [{"matchAttribute": f"{DRIVER}/nvlinkDomain"}]
    claim(server, "c", request(count=2), constraints=together)
    assert picked(scheduler.allocate_claim("default", "c")) == [("gpu", "gpu-2"), ("gpu", "gpu-3")]
    claim(server, "d", request("a"), request("b"), constraints=together)
    with pytest.raises(AllocationError):
        scheduler.allocate_claim("default", "d")


def test_distinct_attribute_spreads(server, scheduler):
    publish(server, [gpu(i) for i in range(4)])
    claim(server, "c", request(count=2), constraints=[{"distinctAttribute": f"{DRIVER}/nvlinkDomain"}])
    assert picked(scheduler.allocate_claim("default", "c")) == [("gpu", "gpu-0"), ("gpu", "gpu-2")]


def test_all_takes_everything_or_nothing(server, scheduler):
    publish(server, [gpu(0), gpu(1)])
    claim(server, "all", request(allocationMode="All"))
    claim(server, "one", request())
    scheduler.allocate_claim("default", "one")
    with pytest.raises(AllocationError):
        scheduler.allocate_claim("default", "all")
    scheduler.release_claim("default", "one")
    assert picked(scheduler.allocate_claim("default", "all")) == [("gpu", "gpu-0"), ("gpu", "gpu-1")]


def test_admin_access_gets_taken_devices_and_takes_none(server, scheduler):
    publish(server, [gpu(0)])
    for name, fields in (("user", {}), ("admin", {"adminAccess": True, "allocationMode": "All"})):
        claim(server, name, request(**fields))
        scheduler.allocate_claim("default", name)
    results = server.objects("resourceclaims")[0]["status"]["allocation"]["devices"]["results"]
    assert results[0]["adminAccess"] is True
    scheduler.release_claim("default", "user")
    claim(server, "next", request())
    assert picked(scheduler.allocate_claim("default", "next")) == [("gpu", "gpu-0")]


@pytest.mark.parametrize(
    ("effect", "free"), [("NoSchedule", "gpu-1"), ("NoExecute", "gpu-1"), ("None", "gpu-0")]
)
def test_tainted_device_is_left_out_unless_tolerated(server, scheduler, effect, free):
    publish(server, [gpu(0, taints=[{"key": "a/xid", "value": "79", "effect": effect}]), gpu(1)])
    claim(server, "plain", request())
    claim(server, "brave", request(tolerations=[{"key": "a/xid", "operator": "Exists"}]))
    assert picked(scheduler.allocate_claim("default", "plain")) == [("gpu", free)]
    scheduler.release_claim("default", "plain")
    assert picked(scheduler.allocate_claim("default", "brave")) == [("gpu", "gpu-0")]


@pytest.mark.parametrize("fields", [{}, {"adminAccess": True}])
def test_all_devices_are_not_to_be_had_while_one_is_tainted(server, scheduler, fields):
    publish(server, [gpu(0, taints=[{"key": "a/xid", "value": "79", "effect": "NoSchedule"}]), gpu(1)])
    claim(server, "plain", request(allocationMode="All", **fields))
    claim(server, "brave", request(allocationMode="All", tolerations=[{"operator": "Exists"}], **fields))
    with pytest.raises(AllocationError):
        scheduler.allocate_claim("default", "plain")
    assert len(picked(scheduler.allocate_claim("default", "brave"))) == 2


def test_first_available_takes_the_first_that_fits(server, scheduler):
    publish(server, [gpu(0), gpu(1)])
    many = {"name": "many", "deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 3}
    few = many | {"name": "few", "count": 2}
    claim(server, "c", {"name": "gpu", "firstAvailable": [many, few]})
    stored = scheduler.allocate_claim("default", "c")
    assert picked(stored) == [("gpu/few", "gpu-0"), ("gpu/few", "gpu-1")]
    assert stored["status"]["allocation"]["devices"]["config"][0]["requests"] == ["gpu/few"]


def test_incomplete_and_outdated_pools_are_ignored(server, scheduler):
    publish(server, [gpu(0)], generation=1, count=1, name="s-0")
    publish(server, [gpu(1)], generation=2, count=2, name="s-1")
    claim(server, "c", request())
    with pytest.raises(AllocationError):
        scheduler.allocate_claim("default", "c")
    publish(server, [gpu(2)], generation=2, count=2, name="s-2")
    assert picked(scheduler.allocate_claim("default", "c")) == [("gpu", "gpu-1")]


@pytest.mark.parametrize(
    ("devices", "fields", "text"),
    [
        ([gpu(0)], {"deviceClassName": "absent"}, "device class absent does not exist"),
        ([{"name": "bare"}], {}, "no such key: type"),
    ],
)
def test_what_is_not_supported_is_refused(server, scheduler, devices, fields, text):
    publish(server, devices)
    claim(server, "c", request(**fields))
    with pytest.raises(AllocationError, match=text):
        scheduler.allocate_claim("default", "c")
    assert "status" not in server.objects("resourceclaims")[0]


def test_pod_gets_claims_from_templates_on_one_node(server, scheduler):
    publish(server, [gpu(0)], node="n1")
    publish(server, [gpu(0), gpu(1)], node="n2")
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


def test_shared_claim_stays_until_the_last_pod_leaves(server, scheduler):
    publish(server, [gpu(0)])
    claim(server, "c", request())
    entries = [{"name": "x", "resourceClaimName": "c"}]
    pods = []
    for name in ("p", "q"):
        server.add(
            "pods", {"metadata": {"name": name, "namespace": "default"}, "spec": {"resourceClaims": entries}}
        )
        pods.append(scheduler.schedule_pod("default", name))
    left = scheduler.release_claim("default", "c", pod=pods[0])
    assert [entry["name"] for entry in left["status"]["reservedFor"]] == ["q"]
    assert left["status"]["allocation"]
    assert "status" not in scheduler.release_claim("default", "c", pod=pods[1])


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=5), devices=st.integers(1, 8))
def test_no_device_is_given_twice(counts, devices):
    server = PlaygroundApiServer()
    spec = {"selectors": [{"cel": {"expression": IS_GPU}}]}
    server.add("deviceclasses", {"metadata": {"name": DRIVER}, "spec": spec}, group=GROUP)
    publish(server, [gpu(i) for i in range(devices)])
    scheduler, given_out = PlaygroundScheduler(server), []
    for number, count in enumerate(counts):
        claim(server, f"c{number}", request(count=count))
        try:
            given_out += picked(scheduler.allocate_claim("default", f"c{number}"))
        except AllocationError:
            assert len(given_out) + count > devices
    assert len(given_out) == len(set(given_out)) <= devices
