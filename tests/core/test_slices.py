import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.core.limits import device_faults, pool_faults
from dra_driver.core.slices import Pool, SliceContent, build_pool
from dra_driver.model.inventory import Inventory
from tests.core.samples import GPU_0, GPU_1, NODE, VERSIONS, h100, inventory, mig, partitioned, uuid
from tests.core.samples import ONE_G as PROFILE


def names(pool: Pool) -> list[list[str]]:
    return [[device["name"] for device in content.devices] for content in pool.slices]


def test_pool_is_one_empty_slice_when_there_is_no_device() -> None:
    assert build_pool(Inventory(), NODE) == Pool(NODE, (SliceContent(),))


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (64, [64]), (65, [64, 1]), (128, [64, 64]), (130, [64, 64, 2])]
)
def test_devices_are_chunked_at_64(count: int, sizes: list[int]) -> None:
    pool = build_pool(inventory(*(h100(number) for number in range(count))), NODE)
    assert [len(content.devices) for content in pool.slices] == sizes
    assert [name for chunk in names(pool) for name in chunk] == [
        f"gpu-{number:08x}" for number in range(count)
    ]
    assert pool.faults == ()


def test_device_is_left_out_and_told_when_it_breaks_a_limit() -> None:
    parts = [
        mig(1, replace(PROFILE, name=f"1g.{'9' * 50}gb"), 0, 1, 7),
        mig(1, PROFILE, 1, 1, 8),
    ]
    pool = build_pool(inventory(h100(0), partitioned(1, *parts)), NODE)
    refused = f"{GPU_1}-mig-1g{'9' * 50}gb-19-0"
    assert names(pool) == [[GPU_0, f"{GPU_1}-mig-1g10gb-19-1"]]
    assert pool.faults == (f"device {refused!r}: the name is no DNS label",)


def test_device_is_left_out_when_it_has_too_many_capacities() -> None:
    wide = mig(0, PROFILE, 0, 30, 7)
    pool = build_pool(inventory(partitioned(0, wide), h100(1)), NODE)
    assert names(pool) == [[GPU_1]]
    assert pool.faults == (
        f"device {GPU_0}-mig-1g10gb-19-0: 53 attributes and capacities, at most 32 are allowed",
    )


def test_full_size_mig_device_stays_within_the_limits() -> None:
    whole = mig(0, replace(PROFILE, name="7g.80gb", profile_id=0), 0, 8, 0)
    pool = build_pool(inventory(partitioned(0, whole)), NODE)
    (device,) = pool.slices[0].devices
    assert len(device["attributes"]) + len(device["capacity"]) == 31
    assert pool.faults == ()


def spoilt() -> Iterator[tuple[dict, str]]:
    def device(**changes: object) -> dict:
        return {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}, **changes}

    yield device(name="GPU-0"), "device 'GPU-0': the name is no DNS label"
    yield device(attributes={"a-b": {"int": 1}}), "device gpu-0: 'a-b' is no attribute or capacity name"
    yield (
        device(attributes={"x" * 33: {"int": 1}}),
        f"device gpu-0: '{'x' * 33}' is no attribute or capacity name",
    )
    yield (
        device(attributes={"UPPER/x": {"int": 1}}),
        "device gpu-0: 'UPPER/x' is no attribute or capacity name",
    )
    yield device(attributes={"/x": {"int": 1}}), "device gpu-0: '/x' is no attribute or capacity name"
    long_domain = f"{'d' * 64}/x"
    yield (
        device(attributes={long_domain: {"int": 1}}),
        f"device gpu-0: '{long_domain}' is no attribute or capacity name",
    )
    yield device(capacity={"1x": {"value": "1"}}), "device gpu-0: '1x' is no attribute or capacity name"
    yield (
        device(attributes={"a": {"string": "ä" * 33}}),
        "device gpu-0: attribute a: longer than 64 bytes",
    )
    yield (
        device(attributes={"a": {"version": "570.124.06"}}),
        "device gpu-0: attribute a: '570.124.06' is no semantic version",
    )
    yield (
        device(attributes={"a": {"int": 1, "bool": True}}),
        "device gpu-0: attribute a: must have exactly one of int, bool, string, version",
    )
    yield (
        device(attributes={"a": {}}),
        "device gpu-0: attribute a: must have exactly one of int, bool, string, version",
    )
    yield device(taints=[{"key": "k", "effect": "NoSchedule"}] * 17), "device gpu-0: more than 16 taints"
    yield (
        device(consumesCounters=[{"counterSet": "s", "counters": {}}] * 3),
        "device gpu-0: consumes from more than 2 counter sets",
    )
    yield (
        device(attributes={f"a{number}": {"int": 1} for number in range(33)}),
        "device gpu-0: 33 attributes and capacities, at most 32 are allowed",
    )


@pytest.mark.parametrize(("device", "fault"), list(spoilt()))
def test_fault_is_named_when_the_api_server_would_refuse(device: dict, fault: str) -> None:
    assert device_faults(device) == [fault]


def test_device_at_every_limit_is_taken() -> None:
    device = {
        "name": "a" * 63,
        "attributes": {
            "x" * 32: {"string": "ä" * 32},
            f"{'d' * 63}/x": {"version": "1.2.3-rc.1+build"},
            **{f"a{number}": {"int": number} for number in range(30)},
        },
        "taints": [{"key": "k", "effect": "NoSchedule"}] * 16,
    }
    assert device_faults(device) == []


def test_pool_faults_name_duplicates_and_unknown_counters() -> None:
    counters = [{"name": "set-0", "counters": {"memory": {"value": "1"}}}] * 2
    devices = [
        {"name": "gpu-0", "consumesCounters": [{"counterSet": "set-0", "counters": {"memory": {}, "x": {}}}]},
        {"name": "gpu-0", "consumesCounters": [{"counterSet": "set-1", "counters": {}}]},
    ]
    assert pool_faults(devices, counters) == [
        "device name gpu-0 occurs more than once in the pool",
        "counter set name set-0 occurs more than once in the pool",
        "device gpu-0: consumes unknown counters of set-0: ['x']",
        "device gpu-0: consumes unknown counters of set-1: []",
    ]


@given(st.permutations(range(6)))
def test_same_hardware_gives_the_same_bytes(order: list[int]) -> None:
    gpus = sorted((h100(number) for number in order), key=lambda gpu: gpu.pci_bus_id or "")
    domains = {uuid(number): "nvlink-00000000" for number in order}
    pool = build_pool(Inventory(VERSIONS, tuple(gpus), domains), NODE)
    reference = build_pool(inventory(*map(h100, range(6)), **dict(sorted(domains.items()))), NODE)
    assert json.dumps(pool.slices[0].devices) == json.dumps(reference.slices[0].devices)
