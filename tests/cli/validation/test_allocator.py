"""Which devices claims get one after the other, decided as kube-scheduler does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playground.pools import free_devices

from dra_driver.cli.validation.rules.allocator import (
    AllocationError,
    allocate,
    consumption,
    fits,
)
from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.mig import GpuInstance, Placement
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, SharingRule, share_all
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.fakes.samples import DRIVER, GPU_0, NODE, h100, inventory
from tests.fakes.tables import data_of, tabled
from tests.mig.migtables import MODELS, table

Json = dict[str, Any]
DATA = data_of(__file__)
ATTRIBUTES = f"device.attributes['{DRIVER}']"
CLASSES = {
    kind: {"spec": {"selectors": [{"cel": {"expression": f"{ATTRIBUTES}.type == '{kind}'"}}]}}
    for kind in ("gpu", "mig")
}


class Allocations:
    """Claims of one node, tried in their order."""

    def __init__(self, *slices: Json) -> None:
        self.slices = [entry | {"metadata": {"name": f"{place:05x}"}} for place, entry in enumerate(slices)]
        self.held: dict[str, Json] = {}

    def claim(self, name: str, *requests: Json, **devices: Any) -> list[str]:
        """What the claim gets, in words. Raises: AllocationError."""
        spec = {"devices": {"requests": [*map(request, requests or [{}])], **devices}}
        claim = {"metadata": {"name": name}, "spec": spec}
        left = free_devices(self.slices, self.held.values(), NODE)
        [allocation] = allocate(left, [claim], CLASSES, NODE)
        self.held[name] = claim | {"status": {"allocation": allocation}}
        return [reported(one) for one in self.results(name)]

    def results(self, name: str) -> list[Json]:
        return list(self.held[name]["status"]["allocation"]["devices"]["results"])

    def refuses(self, name: str, *requests: Json, **devices: Any) -> str:
        with pytest.raises(AllocationError) as refused:
            self.claim(name, *requests, **devices)
        return str(refused.value)


def request(short: Json) -> Json:
    """A request as in the tables: `of` is the class, `ask` are capacities, `profile` is a MIG profile."""
    exactly = dict(short)
    name = exactly.pop("name", "gpu")
    if "firstAvailable" in exactly:
        return {"name": name, **exactly}
    exactly["deviceClassName"] = exactly.pop("of", "gpu")
    if "profile" in exactly:
        expression = f"{ATTRIBUTES}.profile == '{exactly.pop('profile')}'"
        exactly |= {"deviceClassName": "mig", "selectors": [{"cel": {"expression": expression}}]}
    if "ask" in exactly:
        exactly["capacity"] = {"requests": exactly.pop("ask")}
    return {"name": name, "exactly": exactly}


def reported(result: Json) -> str:
    consumed = (f"{name}={amount}" for name, amount in sorted(result.get("consumedCapacity", {}).items()))
    words = [result["request"], result["device"], *(["admin"] if result.get("adminAccess") else [])]
    return " ".join([*words, *(["share", *consumed] if result.get("shareID") else [])])


def pool_of(devices: list[Json], generation: int = 1, total: int = 1) -> Json:
    pool = {"name": NODE, "generation": generation, "resourceSliceCount": total}
    return {"spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": devices}}


def gpu(index: int, **fields: Any) -> Json:
    attributes = {"type": {"string": "gpu"}, "nvlinkDomain": {"string": f"d{index // 2}"}}
    return {"name": f"gpu-{index}", "attributes": attributes, **fields}


@tabled("devices", "steps")
def test_claims_one_after_the_other(devices: list[Json], steps: list[Json]) -> None:
    node = Allocations(pool_of([gpu(index, **fields) for index, fields in enumerate(devices)]))
    for number, step in enumerate(steps):
        if "ends" in step:
            del node.held[step["ends"]]
            continue
        requested = (step.get("name", str(number)), *step.get("asks", ()))
        constraints = {"constraints": step["constraints"]} if "constraints" in step else {}
        if "refused" in step:
            assert step["refused"] in node.refuses(*requested, **constraints)
        else:
            assert node.claim(*requested, **constraints) == step["gets"]
    shares = [one["shareID"] for name in node.held for one in node.results(name) if "shareID" in one]
    assert len(shares) == len(set(shares))


def test_allocation_has_the_configuration_of_class_and_claim_and_the_node() -> None:
    own, of_class = (
        {"opaque": {"driver": DRIVER, "parameters": {"from": who}}} for who in ("claim", "class")
    )
    classes = {"gpu": {"spec": {"config": [of_class]}}}
    entry = {"requests": ["gpu"], **own}
    few = {"firstAvailable": [{"name": "few", "deviceClassName": "gpu"}]}
    claim = {"spec": {"devices": {"requests": [request(few)], "config": [entry]}}}
    [allocation] = allocate(
        free_devices([pool_of([gpu(0)]) | {"metadata": {"name": "s"}}], (), NODE), [claim], classes, NODE
    )
    assert allocation["devices"]["config"] == [
        {"source": "FromClass", "requests": ["gpu/few"], **of_class},
        {"source": "FromClaim", **entry},
    ]
    [term] = allocation["nodeSelector"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": [NODE]}]


def test_incomplete_and_outdated_pools_are_ignored() -> None:
    slices = [pool_of([gpu(0)]), pool_of([gpu(1)], 2, 2), pool_of([gpu(2)], 2, 2)]
    assert "fit requests gpu" in Allocations(*slices[:2]).refuses("c")
    assert Allocations(*slices).claim("c") == ["gpu gpu-1"]


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=5), devices=st.integers(1, 8))
def test_no_device_is_given_twice(counts: list[int], devices: int) -> None:
    node, given_out = Allocations(pool_of([gpu(i) for i in range(devices)])), []
    for number, count in enumerate(counts):
        try:
            given_out += node.claim(str(number), {"count": count})
        except AllocationError:
            assert len(given_out) + count > devices
    assert len(given_out) == len(set(given_out)) <= devices


# --- consumable capacity ------------------------------------------------------------------------

SHARED = {"capacity": DATA["capacity"], "allowMultipleAllocations": True}


@tabled("requests", "expected")
def test_request_is_rounded_by_the_policy(requests: Json, expected: Json | None) -> None:
    assert consumption(requests, SHARED) == expected


@tabled("requests", "expected")
def test_capacity_without_policy_is_taken_whole_or_as_asked(requests: Json, expected: Json | None) -> None:
    assert consumption(requests, {"capacity": {"m": {"value": "8Gi"}}}) == expected


def test_room_is_counted_by_value() -> None:
    assert fits(SHARED, [{"memory": "4Gi", "slots": "2"}, {"memory": "4096Mi", "slots": "2"}])
    assert not fits(SHARED, [{"memory": "4Gi"}, {"memory": "4Gi"}, {"memory": "1"}])
    assert fits(SHARED, [{"gone": "4Gi"}])


def test_device_that_becomes_shareable_waits_for_its_exclusive_holder() -> None:
    node = Allocations(pool_of([gpu(0)]))
    assert node.claim("before") == ["gpu gpu-0"]
    node.slices = Allocations(pool_of([gpu(0, **SHARED)])).slices
    node.refuses("after")
    del node.held["before"]
    assert node.claim("after") == ["gpu gpu-0 share memory=4Gi slots=2"]


# --- devices as the plugin publishes them -------------------------------------------------------

H100, A30 = (table(MODELS[key]) for key in ("h100-sxm", "a30"))
ONE_GPU = [{"matchAttribute": f"{DRIVER}/parentUUID"}]


def published(*gpus: Any, sharing: SharingPolicy = NO_SHARING) -> Allocations:
    pool = build_pool(inventory(*gpus), NODE, sharing)
    assert pool.faults == ()
    return Allocations(*slice_changes(pool, [], Owner(DRIVER, NODE, "node-uid")).creates)


def on_demand(number: int, *withheld: GpuInstance, raw: Any = H100) -> Any:
    return h100(number, partitioning=partitioned(raw, withheld, offers_whole=True))


def mig(profile: str, name: str = "mig", **fields: Any) -> Json:
    return {"name": name, "profile": profile, **fields}


def slots(devices: list[str]) -> list[str]:
    return [name.partition(f" {GPU_0}-mig-")[2].partition(" ")[0] for name in devices]


@pytest.mark.parametrize(
    ("rule", "ask", "count"),
    [
        (SharingRule("shares", 10), {}, 10),
        (SharingRule("memory"), {"memory": "8155Mi"}, 10),
        (SharingRule("memory"), {}, 1),
        (SharingRule("unlimited", multiprocessors=True), {"multiprocessors": "13"}, 9),
    ],
)
def test_our_own_devices_are_shared_as_often_as_the_rule_says(
    rule: SharingRule, ask: Json, count: int
) -> None:
    node = published(h100(0, multiprocessors=132), sharing=share_all(rule))
    for number in range(count):
        node.claim(str(number), {"ask": ask})
    node.refuses("late", {"ask": ask})


def test_seven_small_devices_fill_a_gpu_from_the_end() -> None:
    node = published(on_demand(0))
    taken = [slots(node.claim(str(number), mig("1g.10gb"))) for number in range(7)]
    assert taken == [[f"1g10gb-19-{start}"] for start in (6, 5, 4, 3, 2, 1, 0)]
    for refused in (mig("1g.10gb"), mig("1g.10gb+me"), mig("1g.20gb"), {}):
        node.refuses("after", refused)


def test_four_devices_of_one_claim_lie_side_by_side_on_one_gpu() -> None:
    node = published(on_demand(0), on_demand(1))
    node.claim("before", mig("1g.10gb"))
    requests = [mig("3g.40gb", "a"), mig("2g.20gb", "b"), mig("1g.10gb", "c", count=2)]
    together = node.claim("together", *requests, constraints=ONE_GPU)
    assert len(together) == 4
    assert len({name.split()[1][: len(GPU_0)] for name in together}) == 1
    node.refuses("eight", mig("1g.10gb", count=8), constraints=ONE_GPU)


def test_admin_access_takes_nothing_of_the_counters_but_needs_them() -> None:
    """As kube-scheduler has it, which `tests/e2e/test_mig.py` shows."""
    node = published(on_demand(0))
    assert node.claim("watch", {"adminAccess": True}) == [f"gpu {GPU_0} admin"]
    assert slots(node.claim("most", mig("7g.80gb"))) == ["7g80gb-0-0"]
    node.refuses("watch-too", {"adminAccess": True})


def test_devices_with_media_extensions_exclude_each_other_where_there_is_one_engine() -> None:
    node = published(on_demand(0, raw=A30))
    assert slots(node.claim("one", mig("1g.6gb+me"))) == ["1g6gb-me-21-3"]
    node.refuses("two", mig("2g.12gb+me"))
    assert slots(node.claim("plain", mig("2g.12gb"))) == ["2g12gb-5-0"]


def test_withheld_device_is_not_allocated() -> None:
    node = published(on_demand(0, GpuInstance(1, 9, Placement(4, 4))))
    assert slots(node.claim("half", mig("3g.40gb"))) == ["3g40gb-9-0"]
    node.refuses("rest", mig("1g.10gb"))


def test_shares_of_one_part_take_its_counters_once() -> None:
    node = published(on_demand(0), sharing=share_all(SharingRule("shares", 2)))
    taken = [slots(node.claim(str(number), mig("3g.40gb"))) for number in range(4)]
    assert taken == [["3g40gb-9-4"], ["3g40gb-9-4"], ["3g40gb-9-0"], ["3g40gb-9-0"]]
    node.refuses("late", mig("3g.40gb"))
