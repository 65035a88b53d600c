"""Counters against silicon: what the scheduler may put together is exactly what a GPU takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.mig.rules.counters import has_counters, partitioned
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DynamicMigDevice, Inventory
from dra_driver.model.mig import GpuInstance, Partitioning, Placement
from dra_driver.model.units import parse_quantity
from dra_driver.simulator.machine_state import Model
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import GPU_0, NODE, h100, inventory
from tests.mig.migtables import MODELS, Silicon, Slot, table

WHOLE: Slot = (-1, -1)
H100, A100, A30, B200 = (MODELS[key] for key in ("h100-sxm", "a100-sxm4-80gb", "a30", "b200"))


def altered(model: Model, profile_id: int, **changes: Any) -> Model:
    return replace(model, mig=[replace(row, **changes) if row.id == profile_id else row for row in model.mig])


TABLES = {
    **MODELS,
    "fewer 2g than fit": altered(A100, 14, max_instances=2),
    "one large media part": altered(H100, 20, multiprocessors=60),
    "parts above the whole": altered(
        altered(H100, 15, multiprocessors=40, copy_engines=3), 9, memory_mib=41000
    ),
}


def gpu_of(model: Model, *withheld: GpuInstance, number: int = 0) -> Gpu:
    return h100(number, partitioning=partitioned(table(model), withheld, offers_whole=True))


class Counters:
    """The pool of one GPU as the scheduler counts it, in whole numbers."""

    def __init__(self, gpu: Gpu) -> None:
        found = inventory(gpu)
        pool = build_pool(found, NODE)
        assert pool.faults == ()
        (counter_set,) = pool.slices[0].shared_counters
        names = list(counter_set["counters"])
        self.left = [int(parse_quantity(counter_set["counters"][name]["value"])) for name in names]
        self.uses: dict[Slot, list[tuple[int, int]]] = {}
        for content in pool.slices[1:]:
            for device in content.devices:
                (use,) = device["consumesCounters"]
                assert use["counterSet"] == counter_set["name"]
                amounts = [
                    (names.index(name), int(parse_quantity(counter["value"])))
                    for name, counter in use["counters"].items()
                ]
                offered = found.by_name[device["name"]]
                slot = (
                    (offered.profile.profile_id, offered.placement.start)
                    if isinstance(offered, DynamicMigDevice)
                    else WHOLE
                )
                self.uses[slot] = [entry for entry in amounts if entry[1]]

    def admits(self, slot: Slot) -> bool:
        return all(self.left[index] >= amount for index, amount in self.uses[slot])

    def admitted(self) -> set[Slot]:
        return {slot for slot in self.uses if self.admits(slot)}

    def take(self, slot: Slot, sign: int = 1) -> None:
        for index, amount in self.uses[slot]:
            self.left[index] -= sign * amount


def packings(silicon: Silicon, order: list[Slot], first: int = 0) -> Iterator[list[Slot]]:
    """Yield every set of instances that fits next to the existing ones; each is created while it is yielded."""
    yield []
    free = silicon.free()
    for position in range(first, len(order)):
        slot = order[position]
        if slot in free:
            silicon.create(slot)
            for rest in packings(silicon, order, position + 1):
                yield [slot, *rest]
            silicon.destroy(slot)


def check_every_packing(counters: Counters, silicon: Silicon, order: list[Slot], first: int = 0) -> int:
    """As `packings`, with the devices taken; how many there were."""
    free = silicon.free()
    assert counters.admitted() - {WHOLE} == free
    count = 1
    for position in range(first, len(order)):
        slot = order[position]
        if slot in free:
            silicon.create(slot)
            counters.take(slot)
            count += check_every_packing(counters, silicon, order, position + 1)
            counters.take(slot, -1)
            silicon.destroy(slot)
    return count


@pytest.mark.parametrize("key", sorted(TABLES))
def test_counters_admit_exactly_what_the_silicon_takes(key: str) -> None:
    silicon, counters = Silicon(TABLES[key]), Counters(gpu_of(TABLES[key]))
    order = sorted(silicon.free())
    assert set(counters.uses) == {*order, WHOLE}
    count = check_every_packing(counters, silicon, order)
    if key in MODELS:
        assert count == {"a30": 76, "rtx-pro-6000": 717}.get(key, 2319)


@pytest.mark.parametrize("key", sorted(TABLES))
def test_whole_gpu_and_its_parts_exclude_each_other(key: str) -> None:
    counters = Counters(gpu_of(TABLES[key]))
    for slot in counters.uses:
        assert counters.admits(WHOLE)
        counters.take(slot)
        assert not counters.admits(WHOLE)
        if slot == WHOLE:
            assert counters.admitted() == set()
        counters.take(slot, -1)


@pytest.mark.parametrize("key", ["a30", "h100-sxm", "rtx-pro-6000", "fewer 2g than fit"])
def test_everything_that_fits_next_to_manual_instances_is_offered(key: str) -> None:
    """For every layout that a person can create, the published devices are exactly those that still fit."""
    model = TABLES[key]
    silicon, raw = Silicon(model), table(TABLES[key])
    for _ in packings(silicon, sorted(silicon.free())):
        made = silicon.instances
        cut = partitioned(raw, made, offers_whole=True)
        offered = [(profile.profile_id, placement.start) for profile, placement in cut.possible]
        assert len(offered) == len(set(offered))
        assert set(offered) == silicon.free()
        assert cut.offers_whole == (not made)
        assert set(cut.withheld) == set(made)


@pytest.mark.parametrize("key", sorted(TABLES))
def test_counters_next_to_manual_instances_are_exact(key: str) -> None:
    """For sampled layouts, everything that can be created next to each."""
    chance = random.Random(f"withheld {key}")
    for _ in range(6):
        silicon = Silicon(TABLES[key])
        for _ in range(chance.randint(2, 3)):
            free = sorted(silicon.free())
            if free:
                silicon.create(chance.choice(free))
        gpu = gpu_of(TABLES[key], *silicon.instances)
        if not has_counters(gpu):
            assert silicon.free() == set()
            continue
        counters = Counters(gpu)
        assert WHOLE not in counters.uses
        check_every_packing(counters, silicon, sorted(silicon.free()))


def test_instance_of_an_unknown_profile_costs_its_memory_slices() -> None:
    strange = GpuInstance(3, 4711, Placement(3, 2))
    offered = partitioned(table(H100), [strange], offers_whole=True).possible
    assert {placement.start for profile, placement in offered if profile.profile_id == 19} == {0, 1, 2, 5, 6}
    assert not any(placement.overlaps(strange.placement) for _, placement in offered)
    assert len(offered) == 5 + 5 + 2 + 1


def test_profile_is_not_offered_when_as_many_exist_as_there_may_be_wherever_they_lie() -> None:
    odd = [GpuInstance(number, 14, Placement(5 + number, 1)) for number in range(3)]
    offered = partitioned(table(H100), odd, offers_whole=True).possible
    assert {profile.profile_id for profile, _ in offered} == {19, 20, 15}


def test_gpu_that_is_taken_whole_by_hand_offers_nothing_and_has_no_counters() -> None:
    gpu = gpu_of(H100, GpuInstance(0, 0, Placement(0, 8)))
    assert not has_counters(gpu)
    pool = build_pool(inventory(gpu, h100(1)), NODE)
    assert [device["name"] for content in pool.slices for device in content.devices] == ["gpu-00000001"]
    assert not any(content.shared_counters for content in pool.slices)


def test_gpu_without_profiles_offers_nothing() -> None:
    assert partitioned(Partitioning(()), (), offers_whole=True) == Partitioning(())


def test_first_devices_of_a_profile_leave_the_large_placements_free() -> None:
    """The scheduler takes the first that suits, so the order of publishing is the order of filling."""
    possible = gpu_of(H100).partitioning.possible
    order = [(profile.profile_id, placement.start) for profile, placement in possible]
    assert order[:8] == [(19, 6), (19, 5), (19, 4), (19, 3), (19, 2), (19, 1), (19, 0), (20, 6)]
    assert order[-5:] == [(14, 0), (9, 4), (9, 0), (5, 0), (0, 0)]
    counters = Counters(gpu_of(H100))
    for slot in order[:3]:
        counters.take(slot)
    assert {(5, 0), (9, 0), (14, 2), (14, 0), (15, 2)} < counters.admitted()


@pytest.mark.parametrize("key", sorted(TABLES))
def test_order_depends_neither_on_that_of_the_table_nor_on_that_of_the_instances(key: str) -> None:
    chance = random.Random(key)
    raw = table(TABLES[key])
    made = [GpuInstance(2, 99, Placement(0, 1)), GpuInstance(1, 98, Placement(2, 1))]
    expected = partitioned(raw, made, offers_whole=True)
    rows = list(raw.profiles)
    chance.shuffle(rows)
    shuffled = partitioned(Partitioning(tuple(rows)), made[::-1], offers_whole=True)
    assert (shuffled.possible, shuffled.withheld) == (expected.possible, expected.withheld)


def totals(gpu: Gpu) -> dict[str, str]:
    (entry,) = build_pool(inventory(gpu), NODE).slices[0].shared_counters
    assert entry["name"] == f"{GPU_0}-counter-set"
    assert list(entry["counters"]) == sorted(entry["counters"])
    return {name: counter["value"] for name, counter in entry["counters"].items()}


def test_counters_of_an_h100_are_those_of_its_largest_profile() -> None:
    assert totals(gpu_of(H100)) == {
        "copy-engines": "8",
        "decoders": "7",
        "encoders": "0",
        "jpeg-engines": "7",
        "memory": "81152Mi",
        **{f"memory-slice-{number}": "1" for number in range(8)},
        "multiprocessors": "132",
        "ofa-engines": "1",
    }


def test_withheld_instances_are_subtracted_from_the_counters() -> None:
    left = totals(gpu_of(H100, GpuInstance(7, 20, Placement(1, 1)), GpuInstance(2, 9, Placement(4, 4))))
    assert left == {
        "copy-engines": "4",
        "decoders": "3",
        "encoders": "0",
        "jpeg-engines": "3",
        "memory": "30Gi",
        **{f"memory-slice-{number}": "1" if number in (0, 2, 3) else "0" for number in range(8)},
        "multiprocessors": str(132 - 16 - 60),
        "ofa-engines": "0",
    }


def test_instances_are_counted_only_where_no_engine_runs_out() -> None:
    assert totals(gpu_of(TABLES["fewer 2g than fit"]))["instances-14"] == "2"
    for key, model in MODELS.items():
        assert not [name for name in totals(gpu_of(model)) if name.startswith("instances")], key


@pytest.mark.parametrize("key", ["parts above the whole", "one large media part", "h100-sxm"])
def test_totals_are_the_most_that_is_ever_used(key: str) -> None:
    model = TABLES[key]
    silicon, rows = Silicon(model), {row.id: row for row in model.mig}
    most = {"multiprocessors": 0, "copy_engines": 0, "memory_mib": 0}
    for packing in packings(silicon, sorted(silicon.free())):
        for name, amount in most.items():
            most[name] = max(amount, sum(getattr(rows[profile], name) for profile, _ in packing))
    counters = totals(gpu_of(model))
    assert int(counters["multiprocessors"]) == most["multiprocessors"]
    assert int(counters["copy-engines"]) == most["copy_engines"]
    assert parse_quantity(counters["memory"]) == most["memory_mib"] << 20


def test_inventory_without_partitions_has_no_counters() -> None:
    found = inventory(
        gpu_of(H100), gpu_of(B200, number=1), gpu_of(A30, GpuInstance(3, 14, Placement(0, 1)), number=2)
    )
    pool = build_pool(found.without_partitions(), NODE)
    # A minor number that may change is not published, with or without partitions.
    whole = (h100(0, minor=None), h100(1, minor=None))
    assert build_pool(Inventory(found.versions, whole), NODE) == pool


@pytest.mark.parametrize("key", ["h100-sxm", "a30", "b200"])
def test_returning_devices_are_those_blocked_by_leaving_instances(key: str) -> None:
    """The published and the returning devices together are the published ones without leaving instances."""
    raw, rnd = table(MODELS[key]), random.Random(7)
    for _ in range(30):
        taken: list[GpuInstance] = []
        for number in range(rnd.randrange(1, 4)):
            left = partitioned(raw, taken, offers_whole=True).possible
            if left:
                profile, placement = rnd.choice(left)
                taken.append(GpuInstance(number, profile.profile_id, placement, rnd.random() < 0.5))
        cut = partitioned(raw, taken, offers_whole=True)
        staying = partitioned(raw, [item for item in taken if not item.leaving], offers_whole=True)
        assert sorted((*cut.possible, *cut.returning), key=staying.possible.index) == list(staying.possible)
        assert not set(cut.possible) & set(cut.returning)
        assert cut.whole_returns == (staying.offers_whole and bool(taken))
        assert not partitioned(raw, taken, offers_whole=False).whole_returns
