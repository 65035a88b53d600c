"""Shared devices as they are published: by the API server's own rules, for every machine and every mode."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from playground.apiserver.slicerules import slice_faults

from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import (
    MAX_SHARES,
    NO_SHARING,
    GpuSelector,
    SharingEntry,
    SharingPolicy,
    SharingRule,
    SharingRuleMode,
    share_all,
)
from dra_driver.model.units import parse_quantity
from dra_driver.sharing.rules.shared_device import multiprocessor_step
from dra_driver.simulator import machine_names
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from dra_driver.validation.rules.consumable import consumption
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import DRIVER, MIG_1G, MIG_3G, MIXED, NODE, h100, inventory

RULES = {
    "memory": SharingRule("memory"),
    "memory-sm": SharingRule("memory", enforce="mps", multiprocessors=True),
    "shares-1": SharingRule("shares", 1),
    "shares-10": SharingRule("shares", 10, multiprocessors=True),
    "unlimited": SharingRule("unlimited"),
    "unlimited-sm": SharingRule("unlimited", multiprocessors=True),
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inventory]:
    found = {}
    for name in machine_names():
        node = SimulatedNode(name, tmp_path_factory.mktemp("machine") / name)
        with structlog.testing.capture_logs():
            found[name] = node.discover()
        node.close()
    return found


def devices(known: Inventory, rule: SharingRule | None) -> list[dict[str, Any]]:
    pool = build_pool(known, NODE, NO_SHARING if rule is None else share_all(rule))
    assert pool.faults == ()
    changes = slice_changes(pool, (), Owner(DRIVER, NODE, "uid"))
    assert [slice_faults({**entry, "metadata": {"name": "s"}}, None) for entry in changes.creates] == [
        [] for _ in changes.creates
    ]
    return [device for content in pool.slices for device in content.devices]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_device_of_every_machine_is_valid_and_leaves_room(
    machines: dict[str, Inventory], rule: SharingRule
) -> None:
    for name, known in machines.items():
        for device, plain in zip(devices(known, rule), devices(known, None), strict=True):
            assert device["allowMultipleAllocations"] is True
            assert device["attributes"] == plain["attributes"] | {"shareable": {"bool": True}}
            assert list(device["attributes"]) == sorted(device["attributes"])
            assert "allowMultipleAllocations" not in plain
            capacity = device.get("capacity", {})
            assert capacity.keys() >= plain.get("capacity", {}).keys()
            assert list(capacity) == sorted(capacity)
            taken = consumption({}, device, DRIVER)
            assert taken is not None, name
            counted = {key for key, amount in taken.items() if parse_quantity(amount) > 0}
            shared_by = ["shares"] if rule.mode == "shares" else []
            clients = ["mpsClients"] if rule.enforce == "mps" else []
            memory = ["memory"] if "memory" in capacity else []
            assert counted == {*shared_by, *clients, *memory}, name
            for entry in capacity.values():
                assert "requestPolicy" in entry


@pytest.mark.parametrize("machine", ["dgx-h100", "h100-mig-static"])
def test_ten_claims_fit_where_ten_shares_are(machines: dict[str, Inventory], machine: str) -> None:
    for device in devices(machines[machine], RULES["shares-10"]):
        taken = consumption({}, device, DRIVER)
        assert taken is not None
        for name, entry in device["capacity"].items():
            assert 10 * parse_quantity(taken[name]) <= parse_quantity(entry["value"])


@pytest.mark.parametrize(
    ("rule", "memory", "others"),
    [
        (
            RULES["memory"],
            {"default": "81559Mi", "validRange": {"min": "1Mi", "max": "81559Mi", "step": "1Mi"}},
            {},
        ),
        (
            RULES["unlimited"],
            {"default": "1Mi", "validRange": {"min": "1Mi", "max": "81559Mi", "step": "1Mi"}},
            {},
        ),
        (
            SharingRule("shares", 4),
            {"default": "20389Mi", "validRange": {"min": "1Mi", "max": "81559Mi", "step": "1Mi"}},
            {
                "shares": {
                    "value": "4",
                    "requestPolicy": {
                        "default": "1",
                        "validRange": {"min": "1", "max": "4", "step": "1"},
                    },
                }
            },
        ),
    ],
    ids=["memory", "unlimited", "shares"],
)
def test_whole_gpu_has_the_known_policies(rule: SharingRule, memory: dict, others: dict) -> None:
    device = devices(inventory(h100(0)), rule)[0]
    assert list(device) == ["name", "attributes", "capacity", "allowMultipleAllocations"]
    assert device["capacity"] == {"memory": {"value": "81559Mi", "requestPolicy": memory}, **others}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("asked", [{}, {"memory": "0"}], ids=["nothing", "zero"])
def test_every_share_costs_memory(machines: dict[str, Inventory], rule: SharingRule, asked: dict) -> None:
    """A quota of memory charges what the scheduler counts; in mode shares all shares of a device still fit."""
    for device in devices(machines["dgx-h100"], rule) + devices(machines["h100-mig-static"], rule):
        taken = consumption(asked, device, DRIVER)
        assert taken is not None
        memory = parse_quantity(taken["memory"])
        assert memory > 0
        assert memory * (rule.shares or 1) <= parse_quantity(device["capacity"]["memory"]["value"])


def test_mig_device_has_a_policy_for_each_capacity() -> None:
    device = next(item for item in devices(MIXED, RULES["memory"]) if item["name"] == MIG_1G)
    one = {"default": "0", "validRange": {"min": "0", "max": "1", "step": "1"}}
    none = {"default": "0", "validValues": ["0"]}
    assert device["capacity"] == {
        "copyEngines": {"value": "1", "requestPolicy": one},
        "decoders": {"value": "1", "requestPolicy": one},
        "encoders": {"value": "0", "requestPolicy": none},
        "jpegEngines": {"value": "1", "requestPolicy": one},
        "memory": {
            "value": "9984Mi",
            "requestPolicy": {
                "default": "9984Mi",
                "validRange": {"min": "1Mi", "max": "9984Mi", "step": "1Mi"},
            },
        },
        "memorySlice0": {"value": "1", "requestPolicy": one},
        "multiprocessors": {
            "value": "16",
            "requestPolicy": {"default": "0", "validRange": {"min": "0", "max": "16", "step": "1"}},
        },
        "ofaEngines": {"value": "0", "requestPolicy": none},
    }


@pytest.mark.parametrize(
    ("count", "capacity"),
    [
        (132, {"value": "132", "range": {"min": "0", "max": "132", "step": "2"}}),
        (72, {"value": "72", "range": {"min": "0", "max": "72", "step": "1"}}),
        (171, {"value": "171", "range": {"min": "0", "max": "170", "step": "2"}}),
        (None, None),
    ],
)
def test_multiprocessors_come_in_steps_of_a_percent(count: int | None, capacity: dict | None) -> None:
    rule = SharingRule("memory", multiprocessors=True)
    stated = devices(inventory(h100(0, multiprocessors=count)), rule)[0]["capacity"]
    if capacity is None:
        assert list(stated) == ["memory"]
    else:
        policy = {"default": "0", "validRange": capacity["range"]}
        assert stated["multiprocessors"] == {"value": capacity["value"], "requestPolicy": policy}


def test_one_share_is_one_valid_value() -> None:
    shares = devices(inventory(h100(0)), SharingRule("shares", 1))[0]["capacity"]["shares"]
    assert shares == {"value": "1", "requestPolicy": {"default": "1", "validValues": ["1"]}}


def test_gpu_of_unknown_memory_is_shared_without_counting() -> None:
    device = devices(inventory(h100(0, memory_bytes=None)), RULES["memory"])[0]
    assert device["allowMultipleAllocations"] is True
    assert "capacity" not in device


def test_only_selected_devices_change_and_the_others_keep_their_bytes() -> None:
    policy = SharingPolicy((SharingEntry(GpuSelector(devices="mig"), RULES["unlimited"]),))
    pool = build_pool(MIXED, NODE, policy)
    plain = {device["name"]: device for device in build_pool(MIXED, NODE).slices[0].devices}
    changed = [device["name"] for device in pool.slices[0].devices if device != plain[device["name"]]]
    assert changed == [MIG_1G, MIG_3G]
    off = SharingPolicy((SharingEntry(GpuSelector(), None),))
    assert build_pool(MIXED, NODE, off) == build_pool(MIXED, NODE) == build_pool(MIXED, NODE, NO_SHARING)


@given(
    memory=st.integers(0, 1 << 42),
    multiprocessors=st.one_of(st.none(), st.integers(1, 400)),
    rule=st.builds(
        SharingRule,
        st.sampled_from(["memory", "unlimited"]),
        st.none(),
        st.sampled_from(["none", "mps"]),
        st.booleans(),
    )
    | st.builds(SharingRule, st.just("shares"), st.integers(1, MAX_SHARES), st.just("none"), st.booleans()),
)
def test_any_card_under_any_rule_is_valid(
    memory: int, multiprocessors: int | None, rule: SharingRule
) -> None:
    known = inventory(h100(0, memory_bytes=memory, multiprocessors=multiprocessors))
    (device,) = devices(known, rule)
    stated = parse_quantity(device["capacity"]["memory"]["value"])
    assert memory - (1 << 20) < stated <= memory


@given(st.integers(1, 1000))
def test_step_is_the_least_that_makes_a_percent(total: int) -> None:
    step = multiprocessor_step(total)
    assert 100 * step >= total > 100 * (step - 1)


@given(
    mode=st.sampled_from(["shares", "memory", "unlimited"]),
    shares=st.integers(1, MAX_SHARES),
    multiprocessors=st.booleans(),
    memory=st.integers(1, 1 << 50),
)
def test_policies_are_valid_for_any_number_of_shares_and_any_memory(
    mode: SharingRuleMode, shares: int, multiprocessors: bool, memory: int
) -> None:
    rule = SharingRule(mode, shares if mode == "shares" else None, multiprocessors=multiprocessors)
    gpu = h100(0, memory_bytes=memory, multiprocessors=132)
    assert all(device["allowMultipleAllocations"] for device in devices(inventory(gpu), rule))
