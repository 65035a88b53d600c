"""Which limits of power and clocks a claim sets, and why one is refused; before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.claims.rules.holders import DeviceHeldError
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, DeviceResult
from dra_driver.model.inventory import Inventory
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Limit, LockClocks, SetPowerLimit, WriteCdiSpec
from dra_driver.power.rules.limits import NO_POWER_POLICY, PowerPolicy
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    NODE,
    claim,
    h100,
    inventory,
    partitioned,
    plan,
    ref,
    result,
    uuid,
)

TWO = inventory(h100(0), h100(1))
SHARE, OTHER_SHARE = "9f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4", "0f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4"


def parameters(*requests: str, **fields: Any) -> DeviceConfig:
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", **fields}
    return DeviceConfig("FromClaim", requests, DRIVER, body)


def limited(*results: str | DeviceResult, **fields: Any) -> AllocatedClaim:
    return claim(*results, configs=(parameters(**fields),))


def limits(
    wanted: AllocatedClaim, policy: PowerPolicy = NO_POWER_POLICY, node: Inventory = TWO, **more: Any
) -> list[Limit]:
    made = plan(wanted, *more.pop("others", ()), found=node, power=policy, **more)
    assert isinstance(made.steps[-1], WriteCdiSpec)
    return [step for step in made.steps if isinstance(step, Limit)]


def refusal(wanted: AllocatedClaim, *policy: PowerPolicy, **more: Any) -> str:
    with pytest.raises(DraDriverError) as caught:
        limits(wanted, *policy, **more)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("power", "watts"),
    [
        ({"limitWatts": 200}, 200),
        ({"limitWatts": 700}, 700),
        ({"percent": 70}, 490),
        ({"percent": 50, "limitWatts": 400}, 350),
        ({"percent": 90, "limitWatts": 400}, 400),
    ],
)
def test_lower_limit_applies_to_each_whole_gpu(power: dict[str, int], watts: int) -> None:
    steps = [SetPowerLimit(uuid(number), watts) for number in range(2)]
    assert limits(limited(GPU_1, GPU_0, power=power)) == steps


@pytest.mark.parametrize(
    ("clocks", "steps"),
    [
        ({"graphicsMHz": {"max": 1200}}, [("graphics", 210, 1200)]),
        ({"memoryMHz": {"min": 2619}}, [("memory", 2619, 2619)]),
        (
            {"graphicsMHz": {"min": 300, "max": 300}, "memoryMHz": {"max": 1600}},
            [("graphics", 300, 300), ("memory", 1593, 1600)],
        ),
        ({"graphicsMHz": {}, "memoryMHz": None}, []),
    ],
)
def test_missing_end_of_a_range_is_that_of_the_gpu(clocks: Any, steps: list[tuple[Any, int, int]]) -> None:
    assert limits(limited(GPU_0, clocks=clocks)) == [LockClocks(uuid(0), *step) for step in steps]


@pytest.mark.parametrize(
    ("fields", "policy", "text"),
    [
        (
            {"power": {"limitWatts": 199}},
            NO_POWER_POLICY,
            "request gpu: power.limitWatts: device gpu-00000000 accepts 200 to 700 W, but the claim asks for 199 W; "
            "change power.limitWatts",
        ),
        (
            {"power": {"percent": 10, "limitWatts": 300}},
            NO_POWER_POLICY,
            "request gpu: power.percent: device gpu-00000000 accepts 200 to 700 W, but the claim asks for 70 W; "
            "change power.percent",
        ),
        (
            {"power": {"limitWatts": 650}},
            PowerPolicy(500, 600),
            "request gpu: power.limitWatts: device gpu-00000000 accepts 200 to 600 W (the GPU 700 W, but the node's "
            "configuration less), but the claim asks for 650 W; change power.limitWatts",
        ),
        ({"power": {"limitWatts": 650}}, PowerPolicy(500, None, 4000), "accepts 200 to 500 W (the GPU 700 W"),
        (
            {"clocks": {"graphicsMHz": {"min": 1500, "max": 1200}}},
            NO_POWER_POLICY,
            "request gpu: clocks.graphicsMHz: device gpu-00000000 accepts a range within 210 to 1980 MHz, but the "
            "claim asks for 1500 to 1200 MHz; change clocks.graphicsMHz",
        ),
        ({"clocks": {"memoryMHz": {"max": 9000}}}, NO_POWER_POLICY, "but the claim asks for 1593 to 9000 MHz"),
    ],
)  # fmt: skip
def test_value_outside_the_range_is_refused(fields: Any, policy: PowerPolicy, text: str) -> None:
    assert text in refusal(limited(GPU_0, **fields), policy)


@pytest.mark.parametrize(
    ("fields", "unknown", "what"),
    [
        ({"power": {"percent": 70}}, "power_limits_w", "power limit"),
        ({"power": {"limitWatts": 500}}, "power_limit_default_w", "power limit"),
        ({"clocks": {"graphicsMHz": {"max": 900}}}, "graphics_clocks_mhz", "graphics clock"),
        ({"clocks": {"memoryMHz": {"max": 1600}}}, "memory_clocks_mhz", "memory clock"),
    ],
)
def test_gpu_without_known_limits_is_refused_and_not_guessed(fields: Any, unknown: str, what: str) -> None:
    node = inventory(replace(h100(0), **{unknown: None}))
    text = f"the {what} of device gpu-00000000 cannot be set, because NVML reports no limits for it; remove "
    assert text in refusal(limited(GPU_0, **fields), node=node)


def test_admin_access_cannot_set_limits_and_needs_none() -> None:
    monitor = result(GPU_0, admin_access=True)
    text = refusal(limited(monitor, power={"limitWatts": 500}))
    assert "adminAccess does not allow; remove them or adminAccess" in text
    assert "adminAccess" in refusal(limited(monitor, clocks={"memoryMHz": {"max": 1600}}))
    assert limits(limited(monitor, power={}, clocks={})) == []


def shared(number: int, watts: int | None) -> AllocatedClaim:
    share = result(GPU_0, share_id=(SHARE, OTHER_SHARE)[number])
    power = {} if watts is None else {"power": {"limitWatts": watts}}
    return replace(limited(share, **power), ref=ref(f"uid-{number}"))


def prepared(wanted: AllocatedClaim) -> ClaimRecord:
    made = plan(wanted, found=TWO)
    return ClaimRecord(wanted, "prepared", "boot-1", made.held_devices(), made.steps)


@pytest.mark.parametrize(("held", "wanted", "fits"), [
    (500, 500, True), (None, None, True), (500, 400, False), (500, None, False), (None, 500, False),
])  # fmt: skip
def test_claims_on_one_gpu_need_the_same_limits(held: int | None, wanted: int | None, fits: bool) -> None:
    """Otherwise the order of their Prepares would decide."""
    others = [prepared(shared(0, held))]
    if fits:
        assert len(limits(shared(1, wanted), others=others)) == (wanted is not None)
        return
    with pytest.raises(DeviceHeldError, match="all claims on a GPU need the same limits of power and clocks"):
        limits(shared(1, wanted), others=others)


def test_shares_within_a_claim_need_the_same_limits() -> None:
    wanted = claim(
        result(GPU_0, "one", share_id=SHARE),
        result(GPU_0, "two", share_id=OTHER_SHARE),
        configs=(parameters("one", power={"limitWatts": 500}), parameters("two", power={"limitWatts": 400})),
    )
    assert "requests one and two share device gpu-00000000: all claims on a GPU need" in refusal(wanted)


def test_prepared_claim_keeps_its_limits_whatever_the_node_says_now() -> None:
    known = prepared(limited(GPU_0, power={"percent": 100}))
    now = inventory(replace(h100(0), power_limit_default_w=None))
    assert limits(known.claim, PowerPolicy(max_w=300), now, known=known) == [SetPowerLimit(uuid(0), 700)]


# --- the node's budget -----------------------------------------------------------------------------


def consumed(policy: PowerPolicy, node: Inventory) -> tuple[str | None, dict[str, str]]:
    """What the budget has, and what each device takes of it."""
    pool = build_pool(node, NODE, power=policy)
    [*sets] = [entry for content in pool.slices for entry in content.shared_counters]
    taken = {
        device["name"]: use["counters"]["watts"]["value"]
        for content in pool.slices
        for device in content.devices
        for use in device.get("consumesCounters", ())
    }
    return (sets[0]["counters"]["watts"]["value"] if sets else None), taken


def test_whole_gpus_consume_their_default_limit_from_the_budget_of_the_node() -> None:
    assert consumed(NO_POWER_POLICY, TWO) == (None, {})
    assert consumed(PowerPolicy(budget_w=1000), TWO) == ("1000", {GPU_0: "700", GPU_1: "700"})
    assert consumed(PowerPolicy(450, None, 1000), TWO) == ("1000", {GPU_0: "450", GPU_1: "450"})
    assert consumed(PowerPolicy(100, None, 1000), TWO)[1] == {GPU_0: "200", GPU_1: "200"}, (
        "as the GPU accepts"
    )
    assert consumed(PowerPolicy(800, None, 1000), TWO)[1] == {GPU_0: "700", GPU_1: "700"}


def test_gpu_in_mig_mode_always_counts_and_an_unknown_limit_counts_as_all() -> None:
    node = inventory(h100(0), partitioned(1), replace(h100(2), power_limits_w=None))
    budget, taken = consumed(PowerPolicy(budget_w=1000), node)
    assert (budget, set(taken.values())) == ("300", {"700", "1000"})
    assert consumed(PowerPolicy(budget_w=500), node)[0] == "0"
