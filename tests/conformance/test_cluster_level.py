"""What the control plane and a driver owe each other, shown on one node with an API server of data."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playground.apiserver import Identity, PlaygroundApiServer

from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slices import SliceCache
from dra_driver.model.claim import Prepared
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import (
    MAX_ATTRIBUTES_AND_CAPACITIES,
    MAX_COUNTER_SETS_PER_SLICE,
    MAX_COUNTERS_PER_SET,
    MAX_DEVICES_PER_SLICE,
    MAX_TAINTS,
    Pool,
    SliceContent,
    build_pool,
    device_faults,
)
from dra_driver.slices.rules.diff import Owner
from tests.conformance.conftest import ConformanceNode, end
from tests.fakes.samples import h100, inventory
from tests.fakes.slices import publisher_of
from tests.fakes.tables import data_of
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, NODE, Json, result

MakeNode = Callable[..., ConformanceNode]
OLD, NEW = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


def names(node: ConformanceNode) -> list[str]:
    return [device["name"] for device in node.devices()]


def test_c14_claims_of_several_pods(node: ConformanceNode) -> None:
    """Pods that share a claim, one after the other or at once, get one answer; old and new claims come in one call."""
    shared, new = node.claim("shared"), node.claim("new")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: node.prepare(shared), range(16)))
    assert all(answer == answers[0] for answer in answers)
    assert isinstance(answers[0][shared.uid], Prepared)
    both = node.prepare(shared, new)
    assert both[shared.uid] == answers[0][shared.uid]
    assert isinstance(both[new.uid], Prepared)
    assert len(node.records()) == len(node.specs()) == 2
    node.take_back(shared, new)
    assert node.is_clean()


def test_c15_slices(node: ConformanceNode) -> None:
    """Slices belong to the Node object, are of its name, come back when deleted and follow the hardware."""
    [node_object] = node.server.objects("nodes", group="")
    owner = {
        "apiVersion": "v1",
        "kind": "Node",
        "name": NODE,
        "uid": node_object["metadata"]["uid"],
        "controller": True,
    }
    [entry] = node.slices()
    assert entry["metadata"]["ownerReferences"] == [owner]
    assert not {"labels", "annotations", "finalizers"} & entry["metadata"].keys()
    spec = entry["spec"]
    assert (spec["driver"], spec["nodeName"]) == (DRIVER, NODE)
    assert spec["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    assert not {"nodeSelector", "allNodes", "perDeviceNodeSelection"} & spec.keys()
    node.wipe()
    node.wait_devices(8)
    node.machine.remove_gpu(3)
    node.wait_devices(7)
    assert [one["spec"]["pool"]["resourceSliceCount"] for one in node.slices()] == [1]


def test_c16_rolling_update(make_node: MakeNode) -> None:
    """Pods start throughout an update, one that never registers included, and slices are not even updated."""
    node = make_node()
    old = node.spawn(POD_UID=OLD)
    node.kubelet.wait_registered(DRIVER)
    node.wait_devices(8)
    published = node.slices()
    running = node.claim("running")
    answer = node.prepare(running)

    node.kubelet.inject("Validate", "refused by the kubelet", times=1000)
    asked = len(node.kubelet.calls("NotifyRegistrationStatus"))
    failed = node.spawn(POD_UID=NEW)
    eventually(lambda: len(node.kubelet.calls("NotifyRegistrationStatus")) > asked)
    other = node.claim("meanwhile")
    assert isinstance(node.prepare(other)[other.uid], Prepared), "the old instance serves"
    end(failed)
    assert node.slices() == published

    node.use_kubelet_quietly().wait_registered(DRIVER)
    new = node.spawn(POD_UID=NEW)
    node.kubelet.wait_registered(DRIVER, count=2)
    assert node.prepare(running) == answer
    end(old)
    node.kubelet.wait_registered(DRIVER, count=1)
    node.take_back(other)

    end(new)
    node.kubelet.wait_registered(DRIVER, count=0)
    node.spawn(POD_UID=OLD)
    node.kubelet.wait_registered(DRIVER)
    assert node.prepare(running) == answer
    node.take_back(running)
    assert node.slices() == published, "one after the other, within the kubelet's patience"


def test_c18_device_status_of_claims(node: ConformanceNode) -> None:
    """Our entry of the claim's status is written and overwritten; what others wrote there stays as it was."""
    foreign: Json = data_of(__file__)["of another driver"]
    ours = names(node)[0]
    theirs = {"request": "nic", **{key: foreign[key] for key in ("driver", "pool", "device", "shareID")}}
    allocated = {"allocation": {"devices": {"results": [result(ours), theirs]}}}
    ref = node.claim("told", status=allocated | {"devices": [foreign]})

    def told() -> dict[str, Json]:
        return {entry["driver"]: entry for entry in node.stored_claim("told")["status"].get("devices", [])}

    node.prepare(ref)
    written = eventually(lambda: told().get(DRIVER))
    assert (written["pool"], written["device"]) == (NODE, ours)
    assert {entry["type"]: entry["status"] for entry in written["conditions"]}["Ready"] == "True"
    assert written["data"]
    assert told()["nic.example.com"] == foreign
    claim = node.stored_claim("told")
    entry = next(one for one in claim["status"]["devices"] if one["driver"] == DRIVER)
    entry["data"] = {"uuid": "somebody else's"}
    resource = node.server.resource("resourceclaims")
    node.server.operations.update(resource, ("default", "told"), claim, status=True)
    node.restart_driver()
    node.prepare(ref)
    eventually(lambda: told()[DRIVER]["data"] == written["data"])
    assert told()["nic.example.com"] == foreign


def test_c19_slices_of_others(make_node: MakeNode) -> None:
    """A token that may write the own node's slices alone is enough, and slices of others are never written."""
    node = make_node()
    others = (
        ("other-node", DRIVER, {"nodeName": "other-node"}),
        ("everybody", DRIVER, {"allNodes": True}),
        ("neighbour", "nic.example.com", {"nodeName": NODE}),
    )
    for name, driver_name, where in others:
        pool = {"name": name, "generation": 7, "resourceSliceCount": 1}
        spec = {"driver": driver_name, "pool": pool, "devices": [], **where}
        body = {"metadata": {"name": name}, "spec": spec}
        node.server.add("resourceslices", body, group="resource.k8s.io")
    foreign = node.slices()
    node.server.tokens = {"secret": Identity("driver", node=NODE)}
    node.server.write_kubeconfig(node.root / "kubeconfig", token="secret")

    driver = node.start_driver()
    node.wait_devices(8)
    node.machine.remove_gpu(3)
    node.wait_devices(7)
    [own] = [one for one in node.slices() if one not in foreign]
    resource = node.server.resource("resourceslices")
    node.server.operations.delete(resource, ("", own["metadata"]["name"]), {})
    node.wait_devices(7)
    eventually(lambda: not driver.problems())
    assert [one for one in node.slices() if one in foreign] == foreign
    writes = node.server.writes("resourceslices")
    assert {request.status for request in writes} <= {200, 201}
    assert not {request.path.rpartition("/")[2] for request in writes} & {name for name, *_ in others}


@pytest.mark.parametrize("served", [("v1",), ("v1beta1", "v1beta2", "v1")], ids="+".join)
def test_c20_versions_of_the_api(make_node: MakeNode, served: tuple[str, ...]) -> None:
    """Whatever versions of the API are served, v1 alone is used."""
    node = make_node()
    driver = node.start_driver()
    devices = node.wait_devices(8)
    ref = node.claim("one")
    answer = node.prepare(ref)
    assert isinstance(answer[ref.uid], Prepared)
    node.unprepare(ref)
    driver.stop()

    node.wipe()
    node.server.served = served
    before = len(node.server.requests)
    node.start_driver()
    assert node.wait_devices(8) == devices
    assert node.prepare(ref) == answer
    asked = [request for request in node.server.requests[before:] if "/resource.k8s.io/v" in request.path]
    assert {request.path.split("/")[3] for request in asked} == {"v1"}


def test_c21_admin_access_and_request_names(node: ConformanceNode) -> None:
    """Admin access shares what is held; a subrequest is answered by its request, any request name by itself."""
    device = names(node)[0]
    holder = node.allocated_by_hand("holder", device)
    watcher = node.allocated_by_hand("watcher", device, adminAccess=True)
    for ref in (holder, watcher):
        node.ready(ref)
    prioritized = {
        "requests": [
            {
                "name": "gpu",
                "firstAvailable": [
                    {"name": "mig", "deviceClassName": "mig.nvidia.com"},
                    {"name": "whole", "deviceClassName": "gpu.nvidia.com"},
                ],
            }
        ]
    }
    ref = node.claim("list", prioritized)
    [result] = node.stored_claim("list")["status"]["allocation"]["devices"]["results"]
    assert result["request"] == "gpu/whole"
    assert [entry.requests for entry in node.prepare(ref)[ref.uid].devices] == [("gpu",)]
    implicit = node.allocated_by_hand("implicit", names(node)[5], request="container-0-request-0")
    assert [entry.requests for entry in node.prepare(implicit)[implicit.uid].devices] == [
        ("container-0-request-0",)
    ]


class Publishing:
    """The publishing half of a driver for any inventory."""

    def __init__(self, server: PlaygroundApiServer, client: ApiClient, content: Inventory) -> None:
        [uid] = [entry["metadata"]["uid"] for entry in server.objects("nodes", group="")]
        self.cache = SliceCache(client, DRIVER, NODE, self._changed)
        self.publisher = publisher_of(lambda: content, self.cache, lambda: Owner(DRIVER, NODE, uid))

    def run(self) -> None:
        """Publish once, then end."""
        self.cache.start()
        self.publisher.start()
        self.publisher.mark_dirty()
        assert self.publisher.wait_published(20)
        self.publisher.stop()
        self.cache.stop()

    def _changed(self) -> None:
        self.publisher.mark_dirty()


def plain_pool() -> tuple[Inventory, Pool]:
    """Eight slices of whole GPUs."""
    content = inventory(*(h100(number) for number in range(8 * MAX_DEVICES_PER_SLICE)))
    return content, build_pool(content, NODE)


def longest(start: str, size: int = 63) -> str:
    """A name as long as it may be."""
    return start + "x" * (size - len(start))


def maximal_device(number: int, sets: list[Json]) -> Json:
    """A device with as much of everything as the API takes beside the rest."""
    kinds: tuple[Json, ...] = (
        {"string": longest("", 64)},
        {"version": longest("1.2.3-", 64)},
        {"int": 2**63 - 1},
        {"bool": True},
    )
    amounts = [f"{amount}Gi" for amount in range(1, 11)]
    policy = {"default": amounts[-1], "validValues": amounts}
    half = MAX_ATTRIBUTES_AND_CAPACITIES // 2
    used = (sets[number % len(sets)], sets[(number + 1) % len(sets)])
    return {
        "name": longest(f"device-{number}-"),
        "attributes": {
            f"{longest('a.')}/{longest(f'a{index}', 32)}": kinds[index % len(kinds)] for index in range(half)
        },
        "capacity": {
            f"{longest('c.')}/{longest(f'c{index}', 32)}": {"value": amounts[-1], "requestPolicy": policy}
            for index in range(half)
        },
        "allowMultipleAllocations": True,
        "consumesCounters": [{"counterSet": one["name"], "counters": one["counters"]} for one in used],
        "taints": [
            {
                "key": f"{longest('t.')}/{longest(f't{index}')}",
                "value": longest("v"),
                "effect": "NoSchedule",
                "timeAdded": "2026-08-07T12:00:00Z",
            }
            for index in range(MAX_TAINTS)
        ],
    }


def maximal_pool() -> tuple[Inventory, Pool]:
    """A slice of counter sets and two of devices, each as full as the API takes."""
    counters = {longest(f"counter-{index}-"): {"value": "1Gi"} for index in range(MAX_COUNTERS_PER_SET)}
    sets = [
        {"name": longest(f"set-{index}-"), "counters": counters}
        for index in range(MAX_COUNTER_SETS_PER_SLICE)
    ]
    devices = [maximal_device(number, sets) for number in range(2 * MAX_DEVICES_PER_SLICE)]
    assert not [fault for device in devices for fault in device_faults(device)]
    chunks = (devices[:MAX_DEVICES_PER_SLICE], devices[MAX_DEVICES_PER_SLICE:])
    slices = (SliceContent(shared_counters=tuple(sets)), *(SliceContent(tuple(chunk)) for chunk in chunks))
    return inventory(h100(0)), Pool(NODE, slices)


@pytest.mark.parametrize("full", [plain_pool, maximal_pool])
def test_c22_many_full_slices(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, full: Callable[[], tuple[Inventory, Pool]]
) -> None:
    """As many creates as there are slices, full of plain or of the largest devices, no other write, and all stored."""
    content, pool = full()
    count = len(pool.slices)
    monkeypatch.setattr("dra_driver.slices.publisher.build_pool", lambda *_, **__: pool)
    with PlaygroundApiServer() as server:
        server.add("nodes", {"metadata": {"name": NODE}})
        server.write_kubeconfig(tmp_path / "kubeconfig")
        client = ApiClient(load_endpoint(tmp_path / "kubeconfig"))
        for _ in range(2):
            Publishing(server, client, content).run()
            assert [request.method for request in server.writes("resourceslices")] == ["POST"] * count
        client.close()
        stored = server.objects("resourceslices")
    assert [entry["spec"].get("devices", []) for entry in stored] == [
        list(one.devices) for one in pool.slices
    ]
    assert [entry["spec"].get("sharedCounters", []) for entry in stored] == [
        list(one.shared_counters) for one in pool.slices
    ]
    assert {entry["spec"]["pool"]["generation"] for entry in stored} == {1}
    assert {entry["spec"]["pool"]["resourceSliceCount"] for entry in stored} == {count}
