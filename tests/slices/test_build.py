from dataclasses import replace
from typing import Any

import pytest

from dra_driver.mig.rules.counters import partitioned as beside
from dra_driver.model.gpu import Fabric, Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, Partitioning, Placement
from dra_driver.model.sharing import NO_SHARING, SharingRule, SharingRuleMode, share_all
from dra_driver.slices.rules import attributes, build
from dra_driver.slices.rules.build import Pool, SliceContent, build_pool, has_its_counters
from tests.fakes.samples import GPU_0, GPU_1, NODE, VERSIONS, card, h100, inventory, mig, partitioned, uuid
from tests.fakes.samples import ONE_G as PROFILE
from tests.mig.migtables import MODELS, table

ENGINES = ("copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines")


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


@pytest.mark.parametrize("mode", ["shares", "memory", "unlimited"])
def test_full_size_mig_device_stays_within_the_limits_when_it_is_shared(mode: SharingRuleMode) -> None:
    """What gives way is a capacity of which there is none."""
    whole = mig(0, replace(PROFILE, name="7g.80gb", profile_id=0), 0, 8, 0)
    rule = SharingRule(mode, 4 if mode == "shares" else None, "mps")
    pool = build_pool(inventory(partitioned(0, whole)), NODE, share_all(rule))
    (device,) = pool.slices[0].devices
    (plain,) = build_pool(inventory(partitioned(0, whole)), NODE).slices[0].devices
    assert pool.faults == ()
    assert device["attributes"] == plain["attributes"] | {"shareable": {"bool": True}}
    left_out = plain["capacity"].keys() - device["capacity"].keys()
    assert {plain["capacity"][name]["value"] for name in left_out} == {"0"}
    assert pool.notes == (
        f"{device['name']}: the slices omit {', '.join(sorted(left_out))}, because a device can have only 32 "
        "attributes and capacities",
    )


H100, A30 = (table(MODELS[key]) for key in ("h100-sxm", "a30"))


def cut(
    number: int, raw: Partitioning = H100, *withheld: GpuInstance, whole: bool = True, **changes: Any
) -> Gpu:
    """A GPU with MIG on demand."""
    return h100(number, partitioning=beside(raw, withheld, offers_whole=whole), **changes)


ALL_ENGINES = replace(PROFILE, name="7g.80gb", profile_id=0, **dict.fromkeys(ENGINES, 1))
STATIC_7G = mig(0, ALL_ENGINES, 0, 8, 0)
IN_FABRIC = {"fabric": Fabric("0" * 36, (1,)), "memory_bytes": 81559 << 20, "multiprocessors": 132}
KINDS: dict[str, Gpu] = {
    "whole": h100(0, **IN_FABRIC),
    "whole with MIG on demand": cut(0, **IN_FABRIC),
    "static": partitioned(0, STATIC_7G),
    "on demand": cut(0, **IN_FABRIC),
    "vfio": h100(0),
}
RULES = {
    "exclusive": None,
    "shares": SharingRule("shares", 4),
    "mps": SharingRule("unlimited", None, "mps", multiprocessors=True),
}


def entries(device: dict[str, Any]) -> list[str]:
    return [*device["attributes"], *device.get("capacity", {})]


def fullest(kind: str, rule: str) -> tuple[dict[str, Any], Pool]:
    """The device of this kind, of which everything is known, and its pool."""
    cards = (card(0),) if kind == "vfio" else ()
    known = Inventory(
        VERSIONS,
        (KINDS[kind],),
        {uuid(0): "nvlink-0"},
        confidential_compute="on",
        imex_channels=4,
        cards=cards,
    )
    given = RULES[rule]
    pool = build_pool(known, NODE, NO_SHARING if given is None else share_all(given))
    kinds = {"static": "mig", "on demand": "mig", "vfio": "vfio"}
    devices = [device for content in pool.slices for device in content.devices]
    of_kind = [one for one in devices if one["attributes"]["type"]["string"] == kinds.get(kind, "gpu")]
    return max(of_kind, key=lambda one: len(entries(one))), pool


_PLACES = {"chassisSerialNumber", "slotNumber", "trayIndex"}
OMITTED = {
    **{("static", rule): {"shareable", "parentMinor"} for rule in ("shares", "mps")},
    **{("whole with MIG on demand", rule): {"encoders", *_PLACES} for rule in ("shares", "mps")},
    ("whole with MIG on demand", "exclusive"): {"encoders", "trayIndex"},
}
"""What devices of these kinds and rules omit; H100 have no encoders."""
_EXACTLY_FULL = {("static", "exclusive"), ("whole", "mps")}


def notes_of(device: dict[str, Any], pool: Pool) -> list[str]:
    return [note for note in pool.notes if note.startswith(f"{device['name']}: ")]


FULLEST = pytest.mark.parametrize(
    ("kind", "rule"),
    [(kind, rule) for kind in KINDS for rule in RULES if kind != "vfio" or rule == "exclusive"],
)


@FULLEST
def test_fullest_device_of_each_kind_is_published(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MAX_ATTRIBUTES_AND_CAPACITIES", 99)
    everything = set(entries(fullest(kind, rule)[0]))
    monkeypatch.undo()
    device, pool = fullest(kind, rule)
    omitted = everything.difference(entries(device))
    expected = OMITTED.get((kind, rule), set())
    assert (omitted, pool.faults, len(notes_of(device, pool))) == (expected, (), bool(expected))


@FULLEST
def test_device_with_one_entry_more_than_fits_omits_what_is_least_important(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MAX_ATTRIBUTES_AND_CAPACITIES", 99)
    everything, before = entries(fullest(kind, rule)[0]), set[str]()
    for most in range(len(everything) - 1, 4, -1):
        monkeypatch.setattr(build, "MAX_ATTRIBUTES_AND_CAPACITIES", most)
        device, pool = fullest(kind, rule)
        omitted = set(everything).difference(entries(device))
        assert (len(omitted), pool.faults) == (len(everything) - most, ())
        assert before < omitted, "the order does not depend on how much is too much"
        assert any(all(name in note for name in omitted) for note in pool.notes)
        before = omitted
    assert {"type", "uuid", "memory", "addressableMemory"} & set(everything) <= set(entries(device))


@FULLEST
def test_new_attribute_at_the_end_gives_way_first(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = fullest(kind, rule)
    later = attributes.Entry("later", "int", both=lambda *_: 1, vfio=lambda *_: 1)
    table = (*attributes.ENTRIES, later)
    monkeypatch.setattr(build, "ENTRIES", table)
    monkeypatch.setattr(attributes, "_BY_KIND", attributes._entries_by_kind(table))
    device, pool = fullest(kind, rule)
    is_full = len(entries(before)) == 32
    assert ("later" not in device["attributes"], pool.faults) == (is_full, ())
    assert any("later" in note for note in notes_of(device, pool)) == is_full
    assert is_full == ((kind, rule) in {*OMITTED, *_EXACTLY_FULL})
    device["attributes"].pop("later", None)
    assert device == before


def test_counters_that_a_device_consumes_have_to_be_in_the_pool() -> None:
    sets = [{"name": "set-0", "counters": {"memory": {"value": "1Gi"}}}]

    def consuming(name: str, *counters: str) -> dict[str, Any]:
        use = {"counterSet": name, "counters": {key: {"value": "1"} for key in counters}}
        return {"name": "gpu-0", "consumesCounters": [use]}

    assert has_its_counters({"name": "gpu-0"}, sets)
    assert has_its_counters(consuming("set-0", "memory"), sets)
    assert not has_its_counters(consuming("set-0", "memory", "decoders"), sets)
    assert not has_its_counters(consuming("set-1", "memory"), sets)


def counter_sets(pool: Pool) -> list[list[str]]:
    return [[entry["name"] for entry in content.shared_counters] for content in pool.slices]


def test_counter_sets_come_first_in_slices_of_their_own() -> None:
    pool = build_pool(inventory(*(cut(number, A30) for number in range(9))), NODE)
    assert pool.faults == ()
    sets = [f"gpu-{number:08x}-counter-set" for number in range(9)]
    assert counter_sets(pool)[:2] == [sets[:8], sets[8:]]
    assert not any(content.devices for content in pool.slices[:2])
    assert not any(content.shared_counters for content in pool.slices[2:])
    assert all(0 < len(content.devices) <= 64 for content in pool.slices[2:])


def test_devices_of_one_counter_set_stay_in_one_slice() -> None:
    pool = build_pool(inventory(*(cut(number) for number in range(4)), h100(4)), NODE)
    parents = [sorted({name[: len(GPU_0)] for name in chunk}) for chunk in names(pool)]
    assert parents == [[], [GPU_0, GPU_1], ["gpu-00000002", "gpu-00000003", "gpu-00000004"]]
    assert [len(chunk) for chunk in names(pool)] == [0, 52, 53]


def test_gpus_that_are_not_partitioned_carry_no_counters() -> None:
    parts = partitioned(1, mig(1, PROFILE, 0, 1, 7))
    mixed = build_pool(inventory(h100(0), parts, cut(2)), NODE)
    plain = build_pool(inventory(h100(0), parts), NODE)
    assert mixed.slices[1].devices[:2] == plain.slices[0].devices
    assert not any("consumesCounters" in device for device in plain.slices[0].devices)
    assert all("consumesCounters" in device for device in mixed.slices[1].devices[2:])
    assert counter_sets(plain) == [[]]


def test_device_without_a_fault_keeps_its_counters_when_another_is_left_out() -> None:
    row = H100.profiles[0]
    long = replace(row, profile=replace(row.profile, name=f"1g.{'9' * 50}gb"))
    pool = build_pool(inventory(cut(0, replace(H100, profiles=(long, *H100.profiles[1:])))), NODE)
    assert len(pool.faults) == 7
    assert counter_sets(pool) == [[f"{GPU_0}-counter-set"], []]
    assert len(pool.slices[1].devices) == 26 - 7


def test_counter_set_goes_when_no_device_is_left() -> None:
    rows = tuple(
        replace(row, profile=replace(row.profile, name=f"{row.profile.slice_count}g.{'9' * 50}gb"))
        for row in H100.profiles
    )
    pool = build_pool(inventory(cut(0, replace(H100, profiles=rows), whole=False), h100(1)), NODE)
    assert names(pool) == [[GPU_1]]
    assert counter_sets(pool) == [[]]
    assert len(pool.faults) == 25


def test_devices_go_with_a_counter_set_that_is_refused() -> None:
    row = H100.profiles[0]
    wide = replace(row, placements=tuple(Placement(start, 1) for start in range(26)))
    pool = build_pool(inventory(cut(0, replace(H100, profiles=(wide,))), cut(1)), NODE)
    assert pool.faults == (
        f"counter set {GPU_0}-counter-set: 33 counters, but only 1 to 32 are allowed, so the plugin publishes no "
        "device of this GPU",
    )
    assert counter_sets(pool) == [[f"{GPU_1}-counter-set"], []]
    assert all(name.startswith(GPU_1) for name in names(pool)[1])


def test_no_device_of_another_gpu_moves_when_instances_are_withheld() -> None:
    gpus = [cut(number) for number in range(8)]
    before = build_pool(inventory(*gpus), NODE)
    gpus[2] = cut(2, H100, GpuInstance(1, 5, Placement(0, 4)))
    after = build_pool(inventory(*gpus), NODE)
    same = [one == other for one, other in zip(before.slices, after.slices, strict=True)]
    assert same == [False, True, False, True, True]
