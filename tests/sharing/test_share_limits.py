"""Limits of shares: examples, and that shares which fit never add up to more than the device has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.validation.rules.allocator import consumption, fits
from dra_driver.errors import InvalidConfigError
from dra_driver.model.inventory import OfferedDevice, StaticMigDevice, WholeGpu
from dra_driver.model.sharing import MAX_MPS_SHARES, SharingRule
from dra_driver.sharing.rules.client_limits import BoundedRule
from dra_driver.sharing.rules.shared_device import ShareLimits, limits_of, memory_mib_of, multiprocessors_of
from dra_driver.slices.rules.attributes import wire_device
from tests.fakes.samples import MIG_1G, MIXED, ONE_G, h100, inventory, mig, partitioned, result
from tests.fakes.tables import read_yaml

GPU = WholeGpu("gpu-0", h100(0, multiprocessors=132))
BLIND = WholeGpu("gpu-0", h100(0, memory_bytes=None))
MEMORY = SharingRule("memory", enforce="mps", multiprocessors=True)
FOUR = SharingRule("shares", 4, enforce="mps", multiprocessors=True)


RULES = {
    "memory": MEMORY,
    "unlimited": SharingRule("unlimited", enforce="mps"),
    "four": FOUR,
    "three": SharingRule("shares", 3),
}
LIMITS = read_yaml(Path(__file__).with_name("tables.yaml"))["limits"]


@pytest.mark.parametrize(("rule", "consumed", "memory", "threads"), LIMITS)
def test_limits_of_a_share(
    rule: str, consumed: dict[str, str], memory: int | None, threads: int | None
) -> None:
    found = limits_of(result("gpu-0", consumed_capacity=consumed), GPU, RULES[rule])
    assert found == ShareLimits(memory, threads)


@pytest.mark.parametrize("shares", [5, 60])
def test_shares_of_an_older_larger_number_are_not_more_than_the_device(shares: int) -> None:
    """The driver lowers the number of shares where MPS serves fewer clients; the claim keeps what it was allocated."""
    share = result("gpu-0", consumed_capacity={"shares": str(shares)})
    assert limits_of(share, GPU, FOUR) == ShareLimits(81559, 100)
    assert limits_of(share, BLIND, FOUR) == ShareLimits(None, 100)


def test_mig_device_is_measured_by_its_profile() -> None:
    device = MIXED.by_name[MIG_1G]
    share = result(MIG_1G, consumed_capacity={"shares": "1", "memory": "0", "multiprocessors": "0"})
    assert limits_of(share, device, FOUR) == ShareLimits(9984 // 4, 25)
    requested = result(MIG_1G, consumed_capacity={"memory": "1Gi", "multiprocessors": "5"})
    assert limits_of(requested, device, MEMORY) == ShareLimits(1024, 31)


def test_unknown_capacity_of_the_device_is_not_a_limit() -> None:
    share = result("gpu-0", consumed_capacity={"shares": "1", "multiprocessors": "8"})
    assert limits_of(share, BLIND, FOUR) == ShareLimits(None, 25)
    assert limits_of(share, BLIND, MEMORY) == ShareLimits()


def test_amount_that_is_not_a_quantity_is_an_error() -> None:
    with pytest.raises(InvalidConfigError, match="'much' is not a quantity"):
        limits_of(result("gpu-0", consumed_capacity={"memory": "much"}), GPU, MEMORY)


def partition(memory_mib: int, multiprocessors: int) -> OfferedDevice:
    profile = replace(ONE_G, memory_mib=memory_mib, multiprocessors=multiprocessors)
    found = next(iter(inventory(partitioned(0, mig(0, profile, 0, 1, 7))).devices()))
    assert isinstance(found, StaticMigDevice)
    return found


wholes = st.builds(
    lambda memory, count: WholeGpu("gpu-0", h100(0, memory_bytes=memory, multiprocessors=count)),
    st.integers(64 << 20, 1 << 38),
    st.one_of(st.none(), st.integers(1, 300)),
)
offered = wholes | st.builds(partition, st.integers(64, 1 << 18), st.integers(1, 150))
rules = st.builds(
    SharingRule, st.sampled_from(["memory", "unlimited"]), st.none(), st.just("mps"), st.booleans()
) | st.builds(SharingRule, st.just("shares"), st.integers(1, 60), st.just("mps"), st.booleans())
fractions = st.floats(0, 1.05)
requested = st.dictionaries(st.sampled_from(["memory", "multiprocessors", "shares"]), fractions)


@given(offered, rules, st.lists(requested, min_size=1, max_size=80))
def test_limits_of_shares_that_fit_never_exceed_the_device(
    device: OfferedDevice, rule: SharingRule, claims: list[dict[str, float]]
) -> None:
    entry = wire_device(device, MIXED, BoundedRule(rule, MAX_MPS_SHARES))
    totals = {
        "memory": (memory_mib_of(device) or 0) << 20,
        "multiprocessors": multiprocessors_of(device) or 0,
        "shares": rule.shares or 0,
    }
    held: list[dict[str, str]] = []
    for wanted in claims:
        requests = {
            name: str(int(part * totals[name])) for name, part in wanted.items() if name in entry["capacity"]
        }
        taken = consumption(requests, entry)
        if taken is not None and fits(entry, [*held, taken]):
            held.append(dict(taken))
    limits = [limits_of(result(device.name, consumed_capacity=taken), device, rule) for taken in held]
    memory = [limit.memory_mib for limit in limits if limit.memory_mib is not None]
    threads = [
        limit.active_thread_percentage for limit in limits if limit.active_thread_percentage is not None
    ]
    assert sum(memory) <= (memory_mib_of(device) or 0)
    assert sum(threads) <= 100
    assert all(limit >= 1 for limit in (*memory, *threads))
    if rule.mode == "memory":
        assert len(memory) == len(held)
    if rule.mode == "shares":
        assert len(threads) == len(held)


@given(st.integers(1, 300), st.data())
def test_percentage_gives_no_more_multiprocessors_than_were_counted(total: int, data: st.DataObject) -> None:
    """MPS rounds a percentage up to whole multiprocessors."""
    device = WholeGpu("gpu-0", h100(0, multiprocessors=total))
    entry = wire_device(device, MIXED, BoundedRule(MEMORY, MAX_MPS_SHARES))
    taken = consumption({"multiprocessors": str(data.draw(st.integers(1, total)))}, entry)
    if taken is None:
        return
    counted = int(taken["multiprocessors"])
    percentage = limits_of(result("gpu-0", consumed_capacity=taken), device, MEMORY).active_thread_percentage
    assert percentage is not None
    assert -(-total * percentage // 100) <= counted
