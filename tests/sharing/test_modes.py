"""Shared devices as they are published: by the API server's own rules, for every machine and every mode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from playground.apiserver.rules import slice_faults

from dra_driver.cli.validation.rules.allocator import consumption
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import (
    MAX_SHARES,
    NO_SHARING,
    GpuSelector,
    SharingEntry,
    SharingPolicy,
    SharingRule,
    share_all,
)
from dra_driver.model.units import parse_quantity
from dra_driver.sharing.rules.shared_device import multiprocessor_step
from dra_driver.simulator import machine_names
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import DRIVER, MIG_1G, MIG_3G, MIXED, NODE, h100, inventory

RULES = {
    "memory": SharingRule("memory"),
    "memory-sm": SharingRule("memory", enforce="mps", multiprocessors=True),
    "shares-1": SharingRule("shares", 1),
    "shares-4": SharingRule("shares", 4),
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
            taken = consumption({}, device)
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
        taken = consumption({}, device)
        assert taken is not None
        for name, entry in device["capacity"].items():
            assert 10 * parse_quantity(taken[name]) <= parse_quantity(entry["value"])


def as_lines(device: dict[str, Any]) -> Iterator[str]:
    """The capacities of a device, one a line: how much there is, and what a claim may have of it."""
    yield f"{device['name']}: {', '.join(device)}"
    for name, capacity in device.get("capacity", {}).items():
        policy = capacity["requestPolicy"]
        allowed = policy.get("validRange") or policy["validValues"]
        yield f"  {name} {capacity['value']}: default {policy['default']}, {json.dumps(allowed)}"


@pytest.mark.parametrize("rule", RULES)
def test_capacities_are_the_golden_ones(rule: str, is_golden: Callable[[Path, str], None]) -> None:
    """Of GPUs with 132 and 171 multiprocessors, which come in steps of a percent, and of a MIG device."""
    known = inventory(
        h100(0, multiprocessors=132),
        h100(1, multiprocessors=171),
        h100(3, memory_bytes=None),
        *MIXED.gpus[2:],
    )
    lines = [line for device in devices(known, RULES[rule]) for line in as_lines(device)]
    is_golden(Path(__file__).parent / "golden" / f"{rule}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("requested", [{}, {"memory": "0"}], ids=["nothing", "zero"])
def test_every_share_costs_memory(machines: dict[str, Inventory], rule: SharingRule, requested: dict) -> None:
    """A quota of memory charges what the scheduler counts; in mode shares all shares of a device still fit."""
    for device in devices(machines["dgx-h100"], rule) + devices(machines["h100-mig-static"], rule):
        taken = consumption(requested, device)
        assert taken is not None
        memory = parse_quantity(taken["memory"])
        assert memory > 0
        assert memory * (rule.shares or 1) <= parse_quantity(device["capacity"]["memory"]["value"])


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
