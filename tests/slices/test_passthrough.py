"""GPUs for containers and virtual machines: the published devices of a card, of which only one can be
allocated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playground.apiserver.rules import slice_faults
from playground.pools import free_devices

from dra_driver.cli.validation.rules.allocator import AllocationError, allocate
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.mig.rules.counters import partitioned as beside
from dra_driver.model.gpu import Card, Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.slices.rules.build import Pool, build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    NODE,
    VFIO_0,
    VFIO_1,
    bound,
    bound_by_hand,
    card,
    h100,
    inventory,
    mig,
    partitioned,
)
from tests.fakes.samples import ONE_G as PROFILE
from tests.mig.migtables import MODELS, table
from tests.slices.test_attributes import check_form
from tests.slices.test_golden_slices import rendered

GOLDEN = Path(__file__).parents[1] / "golden" / "passthrough"
JsonObject = dict[str, Any]


def on_demand(number: int) -> Gpu:
    return replace(h100(number), partitioning=beside(table(MODELS["h100-sxm"]), (), offers_whole=True))


def names(pool: Pool) -> list[list[str]]:
    return [[device["name"] for device in content.devices] for content in pool.slices if content.devices]


def consumed(pool: Pool) -> dict[str, JsonObject]:
    """Of each device, what it takes of which counter set."""
    return {
        device["name"]: {use["counterSet"]: use["counters"] for use in device.get("consumesCounters", ())}
        for content in pool.slices
        for device in content.devices
    }


CASES: dict[str, Inventory] = {
    "plain": inventory(h100(0), h100(1), cards=(card(0), card(1))),
    "under-vfio": inventory(h100(1), cards=(bound(0), card(1), bound_by_hand(2))),
    "no-nvidia-driver": Inventory(cards=(bound_by_hand(0), bound_by_hand(1))),
}


@pytest.mark.parametrize("name", CASES)
def test_pool_is_the_golden_one(name: str, is_golden: Callable[[Path, str], None]) -> None:
    pool = build_pool(CASES[name], NODE, compatibility_groups=True)
    assert pool.faults == ()
    for content in pool.slices:
        for device in content.devices:
            check_form(device)
    is_golden(GOLDEN / f"{name}.yaml", rendered(pool))


def test_views_of_a_card_take_all_of_one_counter_set() -> None:
    taken = consumed(build_pool(inventory(h100(0), h100(1), cards=(card(0),)), NODE))
    whole = {f"{GPU_0}-counter-set": {"gpu": {"value": "1"}}}
    assert taken == {GPU_0: whole, VFIO_0: whole, GPU_1: {}}
    of_demand = consumed(build_pool(inventory(on_demand(0), cards=(card(0),)), NODE))
    assert of_demand[VFIO_0] == of_demand[GPU_0]
    assert len(of_demand) > 2


def test_gpu_with_mig_devices_that_are_there_is_for_no_virtual_machine() -> None:
    pool = build_pool(inventory(partitioned(0, mig(0, PROFILE, 0, 1, 7)), cards=(card(0),)), NODE)
    assert names(pool) == [[f"{GPU_0}-mig-1g10gb-19-0"]]
    assert consumed(pool) == {f"{GPU_0}-mig-1g10gb-19-0": {}}


def test_card_with_a_problem_is_not_offered() -> None:
    found = inventory(h100(0), cards=(card(0, problem="its IOMMU group has a NIC"), bound(1, problem="odd")))
    assert build_pool(found, NODE) == build_pool(inventory(h100(0)), NODE)


def test_card_under_vfio_is_for_virtual_machines_only_and_changes_no_name() -> None:
    alike = replace(h100(1), uuid=h100(0).uuid[:-1] + "d")  # with the short name of GPU 0
    before = inventory(h100(0), alike, cards=(card(0), card(1, gpu_uuid=alike.uuid)))
    after = inventory(alike, cards=(bound(0), card(1, gpu_uuid=alike.uuid)))
    assert [*after.by_name] == [VFIO_0, *[*before.by_name][2:]]
    assert consumed(build_pool(after, NODE))[VFIO_0] == {}


def test_gpu_that_nvml_still_shows_under_vfio_is_not_offered_to_containers() -> None:
    stale = inventory(h100(0), h100(2), cards=(bound(0), bound_by_hand(2)))
    assert [*stale.by_name] == [VFIO_0, "vfio-0000-12-00-0"]
    assert stale.withheld_by_name == {}


def test_whole_gpu_comes_back_only_from_where_this_plugin_put_it() -> None:
    found = inventory(cards=(bound(0), bound_by_hand(1)))
    assert [*found.returning_by_name] == [GPU_0]
    assert found.usable(GPU_0) is not None


def test_no_card_is_offered_where_the_server_drops_counters() -> None:
    for found in (*CASES.values(), inventory(on_demand(0), cards=(card(0),))):
        assert not [name for name in found.without_partitions().by_name if name.startswith("vfio")]


def test_virtual_machines_get_no_shares() -> None:
    pool = build_pool(inventory(h100(0), cards=(card(0),)), NODE, share_all(SharingRule("shares", 4, "mps")))
    shared, whole = pool.slices[1].devices
    assert (shared["allowMultipleAllocations"], "allowMultipleAllocations" in whole) == (True, False)
    assert set(whole["capacity"]) == {"addressableMemory"}


def test_binding_a_card_moves_no_other_device_between_slices() -> None:
    gpus, cards = [h100(number) for number in range(40)], [card(number) for number in range(40)]
    before = names(build_pool(inventory(*gpus, cards=tuple(cards)), NODE))
    assert [len(chunk) for chunk in before] == [64, 16]
    after = names(build_pool(inventory(*gpus[1:], cards=(bound(0), *cards[1:])), NODE))
    assert after == [before[0][1:], before[1]]


STATES = ["nvidia", "ours", "by hand", "on demand", "problem", "none"]


@st.composite
def nodes(draw: st.DrawFn) -> Inventory:
    gpus: list[Gpu] = []
    cards: list[Card] = []
    for number, state in enumerate(draw(st.lists(st.sampled_from(STATES), min_size=1, max_size=5))):
        if state == "ours":
            cards.append(bound(number))
        elif state == "by hand":
            cards.append(bound_by_hand(number))
        else:
            gpus.append(on_demand(number) if state == "on demand" else h100(number))
            cards += [] if state == "none" else [card(number, problem="x" if state == "problem" else None)]
    return Inventory(gpus=tuple(gpus), cards=tuple(cards))


@given(found=nodes(), seed=st.integers(), groups=st.booleans())
def test_no_card_is_given_out_twice_whatever_claims_request(
    found: Inventory, seed: int, groups: bool
) -> None:
    """The scheduler's rules over what is published: each claim of another type, until nothing fits."""
    pool = build_pool(found, NODE, compatibility_groups=groups)
    changes = slice_changes(pool, (), Owner(DRIVER, NODE, "uid"))
    slices = [entry | {"metadata": {"name": f"s{number}"}} for number, entry in enumerate(changes.creates)]
    assert [slice_faults(entry, None) for entry in slices] == [[]] * len(slices)
    classes = standard_classes(DRIVER)
    wanted = ["gpu.nvidia.com", "mig.nvidia.com", "vfio.gpu.nvidia.com"] * 4
    random.Random(seed).shuffle(wanted)
    claims: list[JsonObject] = []
    for number, name in enumerate(wanted):
        request = {"name": "r", "exactly": {"deviceClassName": name}}
        claim = {"metadata": {"name": f"c{number}"}, "spec": {"devices": {"requests": [request]}}}
        try:
            [allocation] = allocate(free_devices(slices, claims, NODE), [claim], classes, NODE)
        except AllocationError:
            continue
        claims.append({**claim, "status": {"allocation": allocation}})
    given_out = [found.by_name[name] for name in _devices(claims)]
    for number, device in enumerate(given_out):
        for other in given_out[:number]:
            if "vfio" in (device.name[:4], other.name[:4]):
                assert device.gpu.uuid != other.gpu.uuid


def _devices(claims: Iterable[JsonObject]) -> list[str]:
    results = (claim["status"]["allocation"]["devices"]["results"] for claim in claims)
    return [entry["device"] for entries in results for entry in entries]


def test_both_views_have_a_place_for_the_other_one() -> None:
    assert [*inventory(h100(0), h100(1), cards=(card(0), card(1))).by_name] == [GPU_0, VFIO_0, GPU_1, VFIO_1]
