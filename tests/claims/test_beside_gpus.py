"""Additional devices of claims: configured for the node, and kept for the claim's lifetime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.errors import ClaimRefusedError, RetryableError
from dra_driver.model.gpu import Fabric, UnreadyFabric
from dra_driver.model.host import ExtraDevices
from dra_driver.model.inventory import Inventory
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.remedies import FABRIC
from tests.fakes.samples import GPU_0, MIG_1G, MIXED, claim, h100, inventory, plan, result

INSIDE = h100(0, fabric=Fabric("7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11", (3,)))
OUTSIDE = h100(1)
NODES = replace(inventory(INSIDE, OUTSIDE), imex_channels=8)
IN, OUT = NODES.by_name


def planned(*results: Any, node: Inventory = NODES, known: ClaimRecord | None = None, **more: Any) -> Plan:
    wanted = replace(claim(), results=tuple(results))
    return plan(wanted, found=node, known=known, extra_devices=ExtraDevices(**more))


def test_only_devices_in_a_fabric_that_are_used_get_the_channel() -> None:
    made = planned(result(IN, "a"), result(OUT, "b"), imex=7)
    assert [device.imex for device in made.devices] == [7, None]
    assert [held.imex for held in made.held_devices()] == [7, None]
    assert [device.imex for device in planned(result(IN, admin_access=True), imex=7).devices] == [None]
    assert not planned(result(IN)).has_extra_devices


@pytest.mark.parametrize("state", ["pending", "broken", "unknown"])
def test_a_claim_for_a_gpu_whose_fabric_is_not_ready_waits_where_it_would_get_a_channel(state: Any) -> None:
    unready = replace(INSIDE, fabric=None, unready_fabric=UnreadyFabric(state, "NVML says so"))
    node = replace(NODES, gpus=(unready, OUTSIDE))
    with pytest.raises(RetryableError) as caught:
        planned(result(IN, "a"), result(OUT, "b"), node=node, imex=7)
    said = str(caught.value)
    assert said.startswith(f"request a: GPU {unready.uuid} of device {IN} ")
    assert ": NVML says so; the claim may need an IMEX channel" in said
    assert FABRIC in said
    for others in ([result(OUT)], [result(IN, admin_access=True), result(OUT, "b")]):
        assert [device.imex for device in planned(*others, node=node, imex=7).devices] == [None] * len(others)
    assert not planned(result(IN), node=node).has_extra_devices
    first = planned(result(IN), imex=7)
    prepared = ClaimRecord(first.claim, "prepared", "boot", first.held_devices(), first.steps)
    assert [one.imex for one in planned(result(IN), node=node, known=prepared, imex=7).devices] == [7]
    with pytest.raises(RetryableError):
        planned(result(IN), node=node, known=replace(prepared, phase="preparing"), imex=7)


def test_a_mig_device_does_not_wait_for_the_fabric_of_its_gpu() -> None:
    part = MIXED.by_name[MIG_1G]
    gpus = tuple(replace(gpu, unready_fabric=UnreadyFabric("pending", "")) for gpu in MIXED.gpus)
    node = replace(MIXED, gpus=gpus)
    assert [device.imex for device in planned(result(part.name), node=node, imex=7).devices] == [None]
    with pytest.raises(RetryableError):
        planned(result(GPU_0), node=node, imex=7)


@pytest.mark.parametrize(
    ("channels", "count", "error", "said"),
    [
        (8, 8, ClaimRefusedError, "IMEX channel 8.*has 8 channels; .* below 8.*NVreg_ImexChannelCount"),
        (0, None, RetryableError, "has no IMEX channels.*gpu-dra-driver doctor"),
        ("all", None, RetryableError, "has no IMEX channels"),
        ("all", 5000, ClaimRefusedError, "all IMEX channels.*has 5000.*imex.channel to a number"),
        ("all", 4097, ClaimRefusedError, "has 4097"),
    ],
)
def test_channels_that_the_driver_does_not_have(
    channels: Any, count: int | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        planned(result(IN), node=replace(NODES, imex_channels=count), imex=channels)
    assert not planned(result(OUT), node=replace(NODES, imex_channels=count), imex=channels).has_extra_devices


def test_a_prepared_claim_keeps_it_and_a_half_prepared_one_does_not() -> None:
    first = planned(result(IN), imex=7, host_devices=("gds",))
    record = ClaimRecord(first.claim, "prepared", "boot", first.held_devices(), first.steps)
    for extra_devices in ({}, {"imex": 2, "host_devices": ("mofed",)}):
        assert planned(result(IN), known=record, **extra_devices).devices == first.devices
        gone = replace(NODES, imex_channels=None)
        assert planned(result(IN), known=record, node=gone, **extra_devices).devices == first.devices
    again = planned(result(IN), known=replace(record, phase="preparing"), imex=2)
    assert [(device.imex, device.host_devices) for device in again.devices] == [(2, ())]
