"""What a cluster has and who uses it, from slices and claims as the API has them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest

from dra_driver.cli.cluster_lists import _Shared
from dra_driver.cli.rules.cluster_view import (
    Count,
    by_node,
    by_product,
    by_user,
    count,
    devices_of,
    holders_of,
    pools_of,
    workload_of,
)
from dra_driver.cli.rules.waiting_pods import WaitingPod, pods_by_claim
from dra_driver.cli.validation.pending_claims import pending_claims
from dra_driver.cli.validation.rules.extended_resources import extended_claims
from dra_driver.cli.validation.rules.standard_classes import standard_classes
from tests.fakes.tables import tabled

DRIVER = "gpu.nvidia.com"
Json = dict[str, Any]


def gpu(name: str, product: str = "H100", slices: str | None = None, **more: Any) -> Json:
    made: Json = {
        "name": name,
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": product},
            "uuid": {"string": f"GPU-{name}"},
        },
        "capacity": {"memory": {"value": "80Gi"}},
        **more,
    }
    if slices is not None:
        made["consumesCounters"] = [
            {"counterSet": f"{name}-counters", "counters": {"slices": {"value": slices}}}
        ]
    return made


def at(bus_id: str) -> Json:
    return {"resource.kubernetes.io/pciBusID": {"string": bus_id}}


def passed(name: str, of: str | None = None) -> Json:
    """A card: as a virtual machine gets it, beside the GPU `of` for containers if it has one."""
    attributes = {"type": {"string": "vfio"}, "productName": {"string": "GH100"}, **at(name)}
    counters = [{"counterSet": f"{of}-counters", "counters": {"slices": {"value": "1"}}}]
    return {"name": name, "attributes": attributes} | ({"consumesCounters": counters} if of else {})


def mig(parent: str, start: int, taken: str = "1", *, is_made: bool = False) -> Json:
    attributes: Json = {
        "type": {"string": "mig"},
        "productName": {"string": "H100"},
        "profile": {"string": "1g.10gb"},
    }
    if is_made:
        attributes["uuid"] = {"string": f"MIG-{start}"}
    counters = [{"counterSet": f"{parent}-counters", "counters": {"slices": {"value": taken}}}]
    return {"name": f"{parent}-mig-{start}", "attributes": attributes, "consumesCounters": counters}


def entry(
    node: str, *devices: Json, generation: int = 1, total: int = 1, driver: str = DRIVER, **spec: Any
) -> Json:
    pool = {"name": node, "generation": generation, "resourceSliceCount": total}
    return {"spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [*devices], **spec}}


def claim(
    name: str, *devices: tuple[str, str], pods: tuple[str, ...] = (), namespace: str = "ml", **more: Any
) -> Json:
    results = [
        {"driver": DRIVER, "pool": pool, "device": device, "request": "gpu", **more}
        for pool, device in devices
    ]
    request = {
        "name": "gpu",
        "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1},
    }
    status: Json = {"reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]}
    if results:
        status["allocation"] = {"devices": {"results": results}}
    return {
        "metadata": {"namespace": namespace, "name": name, "uid": f"uid-{name}"},
        "spec": {"devices": {"requests": [request]}},
        "status": status,
    }


def written_slices(rows: list[Json]) -> list[Json]:
    """Slices as the tables have them: arguments of `entry`, and of `gpu` or `mig` for each device."""
    makers = {"gpu": gpu, "mig": mig, "passed": passed}
    return [
        entry(
            row["node"],
            *(makers[kind](**of) for device in row.get("devices", ()) for kind, of in device.items()),
            **{name: value for name, value in row.items() if name not in ("node", "devices")},
        )
        for row in rows
    ]


def written_claims(rows: list[Json]) -> list[Json]:
    """Claims as the tables have them: arguments of `claim`, `of` are pool and device."""
    return [claim(row["name"], *row["of"], **row.get("more", {})) for row in rows]


def view(slices: list[Json], claims: list[Json]) -> tuple[list[Any], Any, Any]:
    members, problems = pools_of(DRIVER, slices)
    return devices_of(members, holders_of(DRIVER, claims)), members, problems


def counted(slices: list[Json], *claims: Json) -> Count:
    return count(view(slices, [*claims])[0])


COUNTERS = [{"name": "a-counters", "counters": {"slices": {"value": "7"}}}]
CUT = [entry("n", gpu("a", slices="7"), mig("a", 0), mig("a", 1), sharedCounters=COUNTERS)]
TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}


@tabled("slices", "claims", "expected")
def test_counts(slices: list[Json], claims: list[Json], expected: Json) -> None:
    found = Count(**expected)
    assert counted(written_slices(slices), *written_claims(claims)) == found
    assert found.gpus - found.free - found.allocated - found.blocked <= found.tainted


def test_a_card_counts_once_and_as_what_has_it() -> None:
    whole = gpu("a", slices="1")
    whole["attributes"] |= at("vfio-a")
    counters = [{"name": "a-counters", "counters": {"slices": {"value": "1"}}}]
    slices = [entry("n", whole, passed("vfio-a", "a"), passed("vfio-b"), sharedCounters=counters)]
    assert counted(slices) == Count(gpus=2, free=2)
    assert counted(slices, claim("c", ("n", "a"))) == Count(gpus=2, free=1, allocated=1)
    held = view(slices, [claim("vm", ("n", "vfio-a"), pods=("p",))])[0]
    assert [(device.name, device.kind, device.state) for device in held] == [
        ("vfio-a", "vfio", "allocated"),
        ("vfio-b", "vfio", "free"),
    ]
    (user,) = by_user(held, "claim", {})
    assert (user.gpus, user.mig) == (1, {})


def test_equal_parts_of_slices_are_kept_once_and_nothing_changes() -> None:
    """Nodes of one kind differ in little; MIG devices on demand are many."""
    slices = [
        entry(
            node, gpu(node, slices="7"), *(mig(node, number) for number in range(3)), sharedCounters=COUNTERS
        )
        for node in ("n", "m")
    ]
    for one in slices:
        one["metadata"] = {"name": one["spec"]["nodeName"]}
    shared = _Shared()
    kept = [shared(copy.deepcopy(one)) for one in slices]
    assert kept == slices
    [first, second] = [one["spec"]["devices"] for one in kept]
    for here, there in zip(first, second, strict=True):
        assert here["attributes"]["type"] is there["attributes"]["type"]
        [one], [other] = here["consumesCounters"], there["consumesCounters"]
        assert one["counters"] is other["counters"]


def test_nodes_and_products() -> None:
    slices = [entry("b", gpu("b1"), gpu("b2", "A100"), total=2), entry("a", gpu("a1")), entry("empty")]
    devices, members, problems = view(slices, [claim("c", ("a", "a1"))])
    rows = by_node(devices, members, problems)
    assert [(row.node, row.products, row.count.gpus, row.problem) for row in rows] == [
        ("a", ("H100",), 1, None),
        ("b", ("H100", "A100"), 2, "1 of 2 slices are there"),
        ("empty", (), 0, None),
    ]
    assert [(row.product, row.nodes, row.count.free) for row in by_product(devices)] == [
        ("A100", 1, 1),
        ("H100", 2, 1),
    ]


def test_users() -> None:
    slices = [entry("n", gpu("a"), gpu("b"), gpu("s", allowMultipleAllocations=True)), *CUT[0:0]]
    claims = [
        claim("train", ("n", "a"), ("n", "b"), pods=("train-0", "train-1")),
        claim("small", ("n", "s"), pods=("web-7d9c5b8f64-x2k9q",), namespace="web"),
        claim("other", ("n", "s"), namespace="web"),
    ]
    devices, _, _ = view(slices, claims)
    workloads = {
        ("ml", "train-0"): "Job/train",
        ("ml", "train-1"): "Job/train",
        ("web", "web-7d9c5b8f64-x2k9q"): "Deployment/web",
    }

    def rows(what: Any) -> list[tuple[str, str, int, int, int]]:
        return [
            (row.namespace, row.name, row.claims, row.gpus, row.shares)
            for row in by_user(devices, what, workloads)
        ]

    assert rows("namespace") == [("ml", "", 1, 2, 0), ("web", "", 2, 0, 2)]
    assert rows("workload") == [
        ("ml", "Job/train", 1, 2, 0),
        ("web", "(claim other)", 1, 0, 1),
        ("web", "Deployment/web", 1, 0, 1),
    ]
    assert [row[1] for row in rows("pod")] == ["train-0", "train-1", "(claim other)", "web-7d9c5b8f64-x2k9q"]
    assert rows("claim")[0] == ("ml", "train", 1, 2, 0)


@tabled("owner", "expected")
def test_workloads(owner: Json | None, expected: str) -> None:
    assert workload_of({"name": "p", "ownerReferences": [owner] if owner else []}) == expected


# --- who waits ----------------------------------------------------------------------------------


NIC = {
    "metadata": {"name": "nic.example.com"},
    "spec": {"selectors": [{"cel": {"expression": 'device.driver == "nic"'}}]},
}


def waiting(slices: list[Json], *claims: Json, classes: Sequence[Json] = ()) -> Any:
    members, problems = pools_of(DRIVER, slices)
    whole = {pool: found for pool, found in members.items() if pool not in problems}
    classes = [*standard_classes(DRIVER).values(), *classes]
    return [one for one in pending_claims(DRIVER, [*claims], whole, classes) if one.name == "c"]


def test_a_claim_that_has_devices_does_not_wait() -> None:
    assert waiting([entry("n", gpu("a"))], claim("c", ("n", "a"))) == []


@tabled("slices", "others", "asks", "expected")
def test_what_is_said_of_a_claim_that_waits(
    slices: list[Json], others: list[Json], asks: Json, expected: Json
) -> None:
    [found] = waiting(written_slices(slices), *written_claims(others), asking(**asks))
    assert json.loads(json.dumps({name: getattr(found, name) for name in expected})) == expected


def test_claims_of_other_drivers_and_ended_ones_do_not_count() -> None:
    foreign = claim("c")
    foreign["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "nic.example.com"
    assert waiting([entry("n", gpu("a"))], foreign, classes=[NIC]) == []
    ending = claim("c")
    ending["metadata"]["deletionTimestamp"] = "2026-01-05T09:30:00Z"
    assert waiting([entry("n", gpu("a"))], ending) == []


def asking(name: str = "c", *, count: int = 1, selector: str | None = None, **more: Any) -> Json:
    wanted = claim(name)
    exactly = wanted["spec"]["devices"]["requests"][0]["exactly"]
    exactly |= {"count": count, **more}
    if selector is not None:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    return wanted


def test_devices_of_another_driver_are_not_judged() -> None:
    wanted = asking()
    nic = {"name": "nic", "exactly": {"deviceClassName": "nic.example.com"}}
    wanted["spec"]["devices"]["requests"].append(nic)
    [found] = waiting([entry("n", gpu("a"))], wanted, classes=[NIC])
    assert (found.reasons, found.fits) == ((), ())
    assert found.unknown == "class nic.example.com is of another driver"


@tabled("request_of_later")
def test_a_request_of_a_later_version_is_told_and_hides_no_other_claim(request_of_later: Json) -> None:
    later = asking("later")
    later["spec"]["devices"]["requests"] = [request_of_later]
    members, _ = pools_of(DRIVER, [entry("n", gpu("a"))])
    first, second = pending_claims(DRIVER, [later, asking()], members, [*standard_classes(DRIVER).values()])
    assert first.unknown == "request r has a form that this version does not know"
    assert (second.name, second.fits) == ("c", ("n",))


def test_a_selector_that_cannot_be_judged_hides_no_other_claim() -> None:
    broken = asking("broken", selector="device.driver ==")
    members, _ = pools_of(DRIVER, [entry("n", gpu("a"))])
    classes = [*standard_classes(DRIVER).values()]
    first, second = pending_claims(DRIVER, [broken, asking()], members, classes)
    assert (first.name, first.fits) == ("broken", ())
    assert first.unknown
    assert (second.name, second.fits) == ("c", ("n",))


@pytest.mark.parametrize(
    ("attribute", "value"), [("uuid", {"string": "GPU-x"}), ("index", {"int": 7}), ("numaNode", {"int": 7})]
)
def test_a_selector_for_one_device_of_the_cluster_finds_its_node(attribute: str, value: Json) -> None:
    slices = [entry(f"n{number}", gpu("a"), gpu("b")) for number in range(30)]
    slices[17]["spec"]["devices"][1]["attributes"][attribute] = value
    there = f'device.attributes["{DRIVER}"]'
    wanted = json.dumps(next(iter(value.values())))
    selector = f'"{attribute}" in {there} && {there}.{attribute} == {wanted}'
    [found] = waiting(slices, asking(selector=selector))
    assert found.fits == ("n17",)
    assert sum(number for _, number in found.reasons) == 29


def test_devices_of_two_drivers_in_pools_of_one_name_are_told_apart() -> None:
    slices = [entry("n", gpu("a")), entry("n", gpu("a"), driver="nic")]
    held = claim("other", ("n", "a"), driver="nic")
    assert counted(slices, held) == Count(gpus=1, free=1)
    [found] = waiting(slices, held, asking())
    assert found.fits == ("n",)


def test_which_gpu_of_a_node_is_taken_does_not_make_another_kind_of_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dra_driver.cli.validation.pending_claims._MOST_KINDS", 1)
    slices = [entry(f"n{number}", *(gpu(f"g{index}") for index in range(8))) for number in range(8)]
    for number, content in enumerate(slices):
        for index, device in enumerate(content["spec"]["devices"]):
            device["attributes"]["pcieRoot"] = {"string": f"pci{number}{index}"}
    held = [claim(f"h{number}", (f"n{number}", f"g{number}")) for number in range(8)]
    [found] = waiting(slices, *held, asking(count=8))
    text = (
        "request gpu asks for 8 devices, but other claims hold too many "
        "(7 of 8 matching devices are free on n0, the best of them)"
    )
    assert (found.reasons, found.untried) == (((text, 8),), 0)


def test_kinds_of_nodes_that_are_not_looked_at_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.cli.validation.pending_claims._MOST_KINDS", 1)
    slices = [entry("one", gpu("a")), entry("two", gpu("a")), entry("three", gpu("a", "A100"))]
    [found] = waiting(slices, asking())
    assert (found.fits, found.untried) == (("one", "two"), 1)


@pytest.mark.parametrize("same", [True, False])
def test_nodes_differ_by_which_devices_have_an_attribute_in_common(same: bool) -> None:
    slices = [entry("n", *(gpu(f"g{index}") for index in range(2)))]
    for index, device in enumerate(slices[0]["spec"]["devices"]):
        device["attributes"]["nvlinkDomain"] = {"string": "one" if same else f"of-{index}"}
    wanted = asking(count=2)
    wanted["spec"]["devices"]["constraints"] = [{"matchAttribute": f"{DRIVER}/nvlinkDomain"}]
    other = [entry("m", *(gpu(f"g{index}") for index in range(2)))]
    for device in other[0]["spec"]["devices"]:
        device["attributes"]["nvlinkDomain"] = {"string": "two"}
    [found] = waiting(other + slices, wanted)
    assert found.fits == (("m", "n") if same else ("m",))
    if not same:
        [(reason, number)] = found.reasons
        assert number == 1
        assert "matchAttribute" in reason


def shared_gpu(name: str) -> Json:
    return gpu(name, allowMultipleAllocations=True)


def test_what_shares_consume() -> None:
    slices = [entry("n", shared_gpu("s"), gpu("a"), gpu("t", taints=[TAINT]))]
    claims = [
        claim("one", ("n", "s"), pods=("p",), shareID="1", consumedCapacity={"memory": "20Gi"}),
        claim("two", ("n", "s"), shareID="2", consumedCapacity={f"{DRIVER}/memory": "10Gi"}),
    ]
    devices, members, problems = view(slices, claims)
    [node] = by_node(devices, members, problems)
    assert (dict(node.consumed), node.taints) == ({"memory": ("30Gi", "80Gi")}, ("xid:NoSchedule",))
    [user] = by_user(devices, "namespace", {})
    assert (user.shares, dict(user.consumed)) == (2, {"memory": "30Gi"})
    assert [dict(row.consumed) for row in by_user(devices, "claim", {})] == [
        {"memory": "20Gi"},
        {"memory": "10Gi"},
    ]


# --- pods without a node ------------------------------------------------------------------------


def pod(name: str, says: str | None = None, **more: Any) -> Json:
    conditions = [{"type": "PodScheduled", "status": "False", "message": says}] if says else []
    status = {"phase": "Pending", "conditions": conditions, **more.pop("status", {})}
    return {"metadata": {"namespace": "ml", "name": name}, "spec": more, "status": status}


def test_pods_wait_for_claims_by_name_and_of_templates() -> None:
    pods = [
        pod("by-name", "0/3 nodes", resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}]),
        pod(
            "templated",
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}],
            status={"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "templated-gpu-x"}]},
        ),
        pod("early", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}]),
    ]
    assert pods_by_claim(pods) == {
        ("ml", "c"): [WaitingPod("by-name", "0/3 nodes")],
        ("ml", "templated-gpu-x"): [WaitingPod("templated", None)],
    }


@tabled("limits", "expected")
def test_extended_resources_are_claims_to_be(limits: Json, expected: list[Any]) -> None:
    classes = [*standard_classes(DRIVER).values()]
    classes = [
        {**one, "spec": {**one["spec"], "extendedResourceName": "nvidia.com/gpu"}}
        if one["metadata"]["name"] == "gpu.nvidia.com"
        else one
        for one in classes
    ]
    waits = pod("p", containers=[{"name": "main", "resources": {"limits": limits}}])
    made = [
        [request["exactly"]["deviceClassName"], request["exactly"]["count"]]
        for one in extended_claims([waits], classes)
        for request in one["spec"]["devices"]["requests"]
    ]
    assert made == expected
    waits["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "made"}
    assert [*extended_claims([waits], classes)] == []
