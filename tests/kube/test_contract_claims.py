"""Claims and nodes as the driver reads them; runs against the playground and a real server."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from dra_driver.errors import ApiRejectedError, ClaimRefusedError
from dra_driver.kube.claims import ClaimClient, parse_allocated_claim, reserved_pods
from dra_driver.kube.cluster import node_uid
from dra_driver.model.claim import ClaimNow, ClaimRef, DeviceConfig, DeviceResult, PodRef
from tests.fakes.tables import data_of, tabled

_REQUESTS = data_of(__file__)["requests"]


@pytest.fixture
def claim(target):
    name = f"claim-{uuid.uuid4().hex[:8]}"
    obj = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": _REQUESTS}},
    }
    where = {"namespace": target.namespace, "action": "test"}
    yield target.api.call("POST", "resourceclaims", body=obj, **where)
    target.api.call("DELETE", "resourceclaims", name=name, **where)


@pytest.fixture
def pod(target):
    """A pod that may have a claim reserved.

    The controllers of a real cluster would at once take out one that does not exist, and deallocate the claim; this
    one is there and is never scheduled.
    """
    if target.server is not None:
        yield PodRef("pod", "pod-uid")
        return
    pods = f"/api/v1/namespaces/{target.namespace}/pods"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"pod-{uuid.uuid4().hex[:8]}"},
        "spec": {
            "schedulingGates": [{"name": "example.com/never"}],
            "containers": [{"name": "main", "image": "local/workload:e2e"}],
        },
    }
    made = target.api.request("POST", pods, action="test", body=body)["metadata"]
    yield PodRef(made["name"], made["uid"])
    target.api.request("DELETE", f"{pods}/{made['name']}", action="test")


def test_claim_has_v1_shape_whatever_is_served(target, claim):
    read = ClaimClient(target.api).find(ClaimRef(target.namespace, claim["metadata"]["name"], ""))
    assert read == claim
    assert read["apiVersion"] == "resource.k8s.io/v1"
    assert read["spec"]["devices"]["requests"] == _REQUESTS


def test_allocation_is_parsed_when_scheduler_wrote_it(target, claim):
    results = [
        {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"},
        {"request": "any/big", "driver": "other.example.com", "pool": "n", "device": "gpu-1"},
    ]
    opaque = {"driver": "gpu.nvidia.com", "parameters": {"kind": "GpuConfig"}}
    config = [{"source": "FromClass", "requests": ["gpu"], "opaque": opaque}]
    claim["status"] = {"allocation": {"devices": {"results": results, "config": config}}}
    where = {"namespace": target.namespace, "name": claim["metadata"]["name"]}
    target.api.call("PUT", "resourceclaims", subresource="status", body=claim, action="test", **where)
    ref = ClaimRef(target.namespace, claim["metadata"]["name"], claim["metadata"]["uid"])
    allocated = ClaimClient(target.api).read(ref)
    assert allocated.ref == ref
    assert allocated.results == (
        DeviceResult("gpu", "gpu.nvidia.com", "n", "gpu-0"),
        DeviceResult("any/big", "other.example.com", "n", "gpu-1"),
    )
    assert allocated.configs == (
        DeviceConfig("FromClass", ("gpu",), "gpu.nvidia.com", {"kind": "GpuConfig"}),
    )


def opaque_of(kind, **more):
    return {"opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": kind}}, **more}


@tabled("written", "allocated", "names")
def test_names_of_requests_that_the_scheduler_removed_are_put_back(written, allocated, names):
    """Since 1.37 an entry that names all requests comes without them; one that names a request must fit it."""
    ref = ClaimRef("ns", "claim", "uid")
    results = [
        {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"},
        {"request": "any/big", "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-1"},
    ]
    devices = {"results": results, "config": [opaque_of("A", **allocated)]}
    obj = {
        "metadata": {"uid": "uid"},
        "spec": {"devices": {"requests": _REQUESTS, "config": written}},
        "status": {"allocation": {"devices": devices}},
    }
    [entry] = parse_allocated_claim(obj, ref).configs
    assert entry.requests == tuple(names)
    assert entry == replace(entry, requests=()), "a claim that an older release prepared stays prepared"


def test_state_of_a_claim_is_reported_whatever_it_is(target, claim, pod):
    client, name = ClaimClient(target.api), claim["metadata"]["name"]
    ref = ClaimRef(target.namespace, name, claim["metadata"]["uid"])
    assert client.current(ref) == ClaimNow(ref.uid, False, False, None, (), frozenset())
    result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"}
    claim["status"] = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": pod.name, "uid": pod.uid}],
    }
    where = {"namespace": target.namespace, "name": name}
    target.api.call("PUT", "resourceclaims", subresource="status", body=claim, action="test", **where)
    devices = frozenset({("gpu.nvidia.com", "n", "gpu-0")})
    assert client.current(ref) == ClaimNow(ref.uid, False, True, devices, (pod,), frozenset())
    assert client.current(ClaimRef(target.namespace, "absent", ref.uid)) is None


def test_claim_is_refused_when_not_allocated(target, claim):
    name = claim["metadata"]["name"]
    with pytest.raises(ClaimRefusedError) as caught:
        ClaimClient(target.api).read(ClaimRef(target.namespace, name, "another"))
    assert str(caught.value) == f"claim {target.namespace}/{name} not allocated"


def test_claim_is_refused_when_uid_differs():
    obj = {"metadata": {"uid": "new"}, "status": {"allocation": {}}}
    with pytest.raises(ClaimRefusedError) as caught:
        parse_allocated_claim(obj, ClaimRef("ns", "name", "old"))
    assert str(caught.value) == "claim ns/name got replaced"


def test_optional_result_fields_are_kept_when_present():
    result = {
        "request": "gpu",
        "driver": "d",
        "pool": "p",
        "device": "x",
        "adminAccess": True,
        "shareID": "5f0d4f1c-0000-4000-8000-000000000000",
        "consumedCapacity": {"memory": "10Gi", "cores": 5},
    }
    allocation = {"devices": {"results": [result], "config": [{"source": "FromClaim"}]}}
    obj = {"metadata": {"uid": "u"}, "status": {"allocation": allocation}}
    parsed = parse_allocated_claim(obj, ClaimRef("ns", "name", "u"))
    share = "5f0d4f1c-0000-4000-8000-000000000000"
    assert parsed.results == (
        DeviceResult("gpu", "d", "p", "x", True, share, {"memory": "10Gi", "cores": "5"}),
    )
    assert parsed.configs == (DeviceConfig("FromClaim", (), None),)


@pytest.mark.parametrize("devices", [{"results": [{"request": "gpu"}]}, {"config": [{}]}, {"results": ["x"]}])
def test_claim_is_refused_when_allocation_is_malformed(devices):
    obj = {"metadata": {"uid": "u"}, "status": {"allocation": {"devices": devices}}}
    with pytest.raises(ClaimRefusedError, match="claim ns/name has an allocation that cannot be read"):
        parse_allocated_claim(obj, ClaimRef("ns", "name", "u"))


def test_node_uid_is_read(target):
    nodes = target.api.request("GET", "/api/v1/nodes", action="list nodes")["items"]
    assert node_uid(target.api, nodes[0]["metadata"]["name"]) == nodes[0]["metadata"]["uid"]


def test_missing_node_is_named(target):
    with pytest.raises(ApiRejectedError, match='get node absent: nodes "absent" not found'):
        node_uid(target.api, "absent")


def test_name_in_the_pod_is_read_from_the_annotation():
    result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"}
    ref = ClaimRef("ns", "pod-gpus-x7k2p", "uid-1")
    metadata = {"uid": "uid-1"}
    obj = {"metadata": metadata, "status": {"allocation": {"devices": {"results": [result]}}}}
    for found, name in (
        (None, None),
        ({"other": "x"}, None),
        ({"resource.kubernetes.io/pod-claim-name": "gpus"}, "gpus"),
    ):
        metadata["annotations"] = found
        assert parse_allocated_claim(obj, ref).pod_claim_name == name


POD = {"resource": "pods", "name": "trainer-0", "uid": "uid-0"}


@tabled(
    "reserved",
    "pods",
    more=[
        ([POD | {"name": "x" * 254}], None),
        ([POD | {"uid": "u" * 129}], None),
        (
            [POD | {"name": f"p-{n}", "uid": f"u-{n}"} for n in range(300)],
            [(f"p-{n}", f"u-{n}") for n in range(256)],
        ),
    ],
)
def test_pods_are_those_that_have_the_claim_reserved_as_far_as_they_can_be_reported(reserved, pods):
    obj = {"metadata": {"uid": "u"}, "status": {"allocation": {}, "reservedFor": reserved}}
    expected = None if pods is None else tuple(PodRef(*pod) for pod in pods)
    assert reserved_pods(obj) == expected
    assert parse_allocated_claim(obj, ClaimRef("ns", "name", "u")).pods == expected
