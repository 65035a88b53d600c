"""Selectors and policies: which device gets which rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.inventory import WholeGpu
from dra_driver.model.sharing import (
    NO_SHARING,
    GpuSelector,
    SharingEntry,
    SharingPolicy,
    SharingRule,
    is_device_uuid,
    share_all,
)
from tests.fakes.samples import GPU_0, GPU_1, MIG_1G, MIG_3G, MIXED, h100, uuid

MEMORY = SharingRule("memory", enforce="mps")
FOUR = SharingRule("shares", 4)
MIG_UUID = MIXED.by_name[MIG_1G].uuid


def selected(selector: GpuSelector) -> set[str]:
    return {device.name for device in MIXED.devices() if selector.matches(device)}


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        (GpuSelector(), {GPU_0, GPU_1, MIG_1G, MIG_3G}),
        (GpuSelector(devices="gpu"), {GPU_0, GPU_1}),
        (GpuSelector(devices="mig"), {MIG_1G, MIG_3G}),
        (GpuSelector(product_name="NVIDIA H100*"), {GPU_0, GPU_1, MIG_1G, MIG_3G}),
        (GpuSelector(product_name="nvidia h100*"), {GPU_0, GPU_1, MIG_1G, MIG_3G}),
        (GpuSelector(product_name="NVIDIA H100"), set()),
        (GpuSelector(product_name="NVIDIA A100*"), set()),
        (GpuSelector(uuids=frozenset({uuid(0)})), {GPU_0}),
        (GpuSelector(uuids=frozenset({uuid(0).lower(), uuid(1)})), {GPU_0, GPU_1}),
        (GpuSelector(uuids=frozenset({uuid(2)})), {MIG_1G, MIG_3G}),
        (GpuSelector(uuids=frozenset({MIG_UUID})), {MIG_1G}),
        (GpuSelector(uuids=frozenset({MIG_UUID}), devices="gpu"), set()),
        (GpuSelector(pci_bus_ids=frozenset({"0000:11:00.0"})), {GPU_1}),
        (GpuSelector(uuids=frozenset({uuid(0)}), pci_bus_ids=frozenset({"0000:11:00.0"})), set()),
    ],
)
def test_selector_picks(selector: GpuSelector, names: set[str]) -> None:
    assert selected(selector) == names


@pytest.mark.parametrize(
    ("selector", "changes"),
    [
        (GpuSelector(product_name="*"), {"product_name": None}),
        (GpuSelector(pci_bus_ids=frozenset({"0000:10:00.0"})), {"pci_bus_id": None}),
    ],
)
def test_unknown_property_of_a_gpu_matches_nothing(selector: GpuSelector, changes: dict) -> None:
    assert selector.matches(WholeGpu("gpu-0", h100(0)))
    assert not selector.matches(WholeGpu("gpu-0", h100(0, **changes)))


def test_first_entry_that_selects_decides() -> None:
    policy = SharingPolicy(
        (
            SharingEntry(GpuSelector(uuids=frozenset({uuid(0)})), None),
            SharingEntry(GpuSelector(devices="gpu"), MEMORY),
            SharingEntry(GpuSelector(uuids=frozenset({MIG_UUID, uuid(0)})), FOUR),
        )
    )
    rules = {device.name: policy.rule_for(device) for device in MIXED.devices()}
    assert rules == {GPU_0: None, GPU_1: MEMORY, MIG_1G: FOUR, MIG_3G: None}


def test_without_entries_nothing_is_shared_and_one_entry_can_share_all() -> None:
    assert [NO_SHARING.rule_for(device) for device in MIXED.devices()] == [None] * 4
    assert {share_all(FOUR).rule_for(device) for device in MIXED.devices()} == {FOUR}


selectors = st.builds(
    GpuSelector,
    product_name=st.sampled_from([None, "*", "NVIDIA H100*", "NVIDIA A100*"]),
    uuids=st.frozensets(st.sampled_from([uuid(0), uuid(1), uuid(2), MIG_UUID])),
    pci_bus_ids=st.frozensets(st.sampled_from(["0000:10:00.0", "0000:11:00.0"])),
    devices=st.sampled_from(["gpu", "mig", "all"]),
)


@given(selectors, selectors)
def test_selector_that_covers_another_selects_all_of_it(one: GpuSelector, other: GpuSelector) -> None:
    assert one.covers(one)
    assert one.covers(replace(one, devices="mig")) == (one.devices in ("all", "mig"))
    if one.covers(other):
        assert selected(other) <= selected(one)


@pytest.mark.parametrize("text", [uuid(0), MIG_UUID, uuid(0).replace("a", "A")])
def test_uuid_has_the_form(text: str) -> None:
    assert is_device_uuid(text)


@pytest.mark.parametrize(
    "text", ["", "0", "gpu-0", "GPU-0", uuid(0)[4:], uuid(0)[:-1], uuid(0) + "\n", "GPU-" + "g" * 36]
)
def test_uuid_has_not_the_form(text: str) -> None:
    assert not is_device_uuid(text)
