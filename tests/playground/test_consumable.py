"""Consumable capacity in the playground control plane: rounding, room, share IDs, and what is written."""

from __future__ import annotations

import re

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import AllocationError, PlaygroundScheduler

from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.slices.rules.build import build_pool
from dra_driver.validation.rules.consumable import consumption, fits
from tests.fakes.samples import DRIVER, h100, inventory
from tests.fakes.tables import tabled

GROUP = "resource.k8s.io"
SHARE_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
RANGE = {"default": "4Gi", "validRange": {"min": "1Gi", "max": "8Gi", "step": "1Gi"}}
VALUES = {"default": "2", "validValues": ["0", "2", "4"]}


def capacity(value, policy=None):
    return {"value": value} | ({"requestPolicy": policy} if policy else {})


def device(name="gpu-0", **fields):
    stated = {"memory": capacity("8Gi", RANGE), "slots": capacity("4", VALUES)}
    return {
        "name": name,
        "attributes": {"kind": {"string": name}},
        "allowMultipleAllocations": True,
        "capacity": stated,
    } | fields


@tabled("requests", "expected")
def test_request_is_rounded_by_the_policy(requests, expected):
    assert consumption(requests, device(), DRIVER) == expected


@pytest.mark.parametrize(
    ("requests", "expected"), [({}, {"m": "8Gi"}), ({"m": "1500Mi"}, {"m": "1500Mi"}), ({"m": "9Gi"}, None)]
)
def test_capacity_without_policy_is_taken_whole_or_as_asked(requests, expected):
    assert consumption(requests, {"capacity": {"m": capacity("8Gi")}}, DRIVER) == expected


def test_room_is_counted_by_value():
    assert fits(device(), [{"memory": "4Gi", "slots": "2"}, {"memory": "4096Mi", "slots": "2"}])
    assert not fits(device(), [{"memory": "4Gi"}, {"memory": "4Gi"}, {"memory": "1"}])
    assert fits(device(), [{"gone": "4Gi"}])


@pytest.fixture
def server():
    server = PlaygroundApiServer()
    spec = {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]}
    server.add("deviceclasses", {"metadata": {"name": DRIVER}, "spec": spec}, group=GROUP)
    return server


@pytest.fixture
def scheduler(server):
    return PlaygroundScheduler(server)


def published(server, *devices):
    """Replace what the node publishes."""
    stored = server.objects("resourceslices")[0]
    stored["spec"]["devices"] = list(devices)
    resource = server.resource("resourceslices", group=GROUP)
    server.operations.update(resource, ("", stored["metadata"]["name"]), stored)


def publish(server, *devices, **spec):
    full = {
        "driver": DRIVER,
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": list(devices),
        **spec,
    }
    server.add("resourceslices", {"metadata": {"name": "s"}, "spec": full}, group=GROUP)


def request(name="gpu", *, ask=None, **fields):
    asked = {"capacity": {"requests": ask}} if ask else {}
    return {"name": name, "exactly": {"deviceClassName": DRIVER, **asked, **fields}}


def allocate(server, scheduler, name, *requests, namespace="default", **devices):
    spec = {"devices": {"requests": list(requests) or [request()], **devices}}
    server.add(
        "resourceclaims", {"metadata": {"name": name, "namespace": namespace}, "spec": spec}, group=GROUP
    )
    stored = scheduler.allocate_claim(namespace, name)
    return stored["status"]["allocation"]["devices"]["results"]


def test_result_has_a_share_id_and_every_capacity(server, scheduler):
    publish(server, device())
    (result,) = allocate(server, scheduler, "c", request(ask={"slots": "0"}))
    assert SHARE_ID.fullmatch(result.pop("shareID"))
    assert result == {
        "request": "gpu",
        "driver": DRIVER,
        "pool": "n1",
        "device": "gpu-0",
        "consumedCapacity": {"memory": "4Gi", "slots": "0"},
    }


def test_claims_of_several_namespaces_share_until_the_device_is_full(server, scheduler):
    publish(server, device())
    ids = set()
    for team in ("team-0", "team-1"):
        server.add("namespaces", {"metadata": {"name": team}})
    for number in range(8):
        ask = {"memory": "1Gi", "slots": "0"}
        (result,) = allocate(
            server, scheduler, f"c{number}", request(ask=ask), namespace=f"team-{number % 2}"
        )
        ids.add(result["shareID"])
    assert len(ids) == 8
    with pytest.raises(AllocationError, match="no devices on node n1 fit requests gpu"):
        allocate(server, scheduler, "late", request(ask={"memory": "1", "slots": "0"}))
    scheduler.release_claim("team-0", "c0")
    assert scheduler.allocate_claim("default", "late")["status"]["allocation"]


def test_one_claim_may_get_several_shares_of_one_device(server, scheduler):
    publish(server, device("gpu-0"), device("gpu-1"))
    small = {"memory": "1Gi", "slots": "0"}
    results = allocate(server, scheduler, "c", request("a", ask=small, count=2), request("b", ask=small))
    assert [result["device"] for result in results] == ["gpu-0"] * 3
    assert len({result["shareID"] for result in results}) == 3


def test_admin_access_takes_no_share(server, scheduler):
    publish(server, device())
    allocate(server, scheduler, "full", request(ask={"memory": "8Gi"}))
    (result,) = allocate(server, scheduler, "admin", request(adminAccess=True))
    assert result["adminAccess"] is True
    assert "shareID" not in result


def test_exclusive_device_is_selected_by_its_capacity_and_gets_no_share_id(server, scheduler):
    small = {"name": "small", "capacity": {"memory": capacity("8Gi")}}
    large = {"name": "large", "capacity": {"memory": capacity("16Gi")}}
    publish(server, small, large)
    (result,) = allocate(server, scheduler, "c", request(ask={"memory": "9Gi"}))
    assert result == {"request": "gpu", "driver": DRIVER, "pool": "n1", "device": "large"}
    with pytest.raises(AllocationError):
        allocate(server, scheduler, "d", request(ask={"memory": "9Gi"}))


def test_device_that_becomes_shareable_waits_for_its_exclusive_holder(server, scheduler):
    publish(server, {"name": "gpu-0"})
    allocate(server, scheduler, "before")
    published(server, device())
    with pytest.raises(AllocationError):
        allocate(server, scheduler, "after")
    scheduler.release_claim("default", "before")
    assert scheduler.allocate_claim("default", "after")["status"]["allocation"]


def test_dropped_gate_makes_the_device_exclusive():
    server = PlaygroundApiServer(gates={"DRAConsumableCapacity": False})
    scheduler = PlaygroundScheduler(server)
    server.add("deviceclasses", {"metadata": {"name": DRIVER}, "spec": {}}, group=GROUP)
    publish(server, device())
    (result,) = allocate(server, scheduler, "c", request(ask={"memory": "1Gi"}))
    assert "shareID" not in result
    assert "capacity" not in server.objects("resourceclaims")[0]["spec"]["devices"]["requests"][0]["exactly"]
    with pytest.raises(AllocationError):
        allocate(server, scheduler, "d")


@pytest.mark.parametrize(
    ("rule", "ask", "count"),
    [
        (SharingRule("shares", 10), None, 10),
        (SharingRule("memory"), {"memory": "8155Mi"}, 10),
        (SharingRule("memory"), None, 1),
        (SharingRule("unlimited", multiprocessors=True), {"multiprocessors": "13"}, 9),
    ],
)
def test_our_own_devices_are_shared_as_often_as_the_rule_says(server, scheduler, rule, ask, count):
    pool = build_pool(inventory(h100(0, multiprocessors=132)), "n1", share_all(rule))
    publish(server, *pool.slices[0].devices)
    for number in range(count):
        allocate(server, scheduler, f"c{number}", request(ask=ask))
    with pytest.raises(AllocationError):
        allocate(server, scheduler, "late", request(ask=ask))
