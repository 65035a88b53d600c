"""MIG layouts as data: what the names mean, and where the instances go."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.app.settings import config_values
from dra_driver.mig.rules.layouts import (
    LayoutRefusedError,
    NoMigError,
    absent_indices,
    entry_for,
    generated_names,
    is_placeable,
    largest_that_fits,
    target_of,
)
from dra_driver.model.mig import GpuInstance, LayoutEntry, MigLayouts, Placement
from tests.fakes.tables import tabled
from tests.mig.migtables import MODELS, Silicon, table

H100 = "h100-sxm"
TABLES = {key: table(model).profiles for key, model in MODELS.items()}


def made(key: str, entry: LayoutEntry, existing=(), fixed=()) -> list[tuple[str, int]]:
    target = target_of(entry, TABLES[key], existing, fixed)
    return [(row.profile.name, placement.start) for row, placement in target.slots]


def built(key: str, entry: LayoutEntry) -> int:
    """How many instances the simulated silicon took."""
    silicon = Silicon(MODELS[key])
    target = target_of(entry, TABLES[key], (), ())
    for row, placement in target.slots:
        silicon.create((row.profile.profile_id, placement.start))
    return len(target.slots)


def instance(key: str, number: int, profile: str, start: int) -> GpuInstance:
    row = next(row for row in TABLES[key] if row.profile.name == profile)
    return GpuInstance(number, row.profile.profile_id, Placement(start, row.placements[0].size))


@pytest.mark.parametrize("key", MODELS)
def test_every_generated_layout_fits_every_product(key: str) -> None:
    for name in generated_names(TABLES[key]):
        entry = entry_for(name, {}, 0, None, TABLES[key])
        assert built(key, entry) == sum(entry.counts.values()), name
        assert bool(entry.counts) == (name not in ("all-disabled", "all-enabled"))


@tabled("name", "counts")
def test_names_of_an_h100_mean_what_they_mean_to_mig_parted(name: str, counts: dict[str, int]) -> None:
    entry = entry_for(name, {}, 3, None, TABLES[H100])
    assert entry.mode
    assert dict(entry.counts) == counts


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        LayoutRefusedError, match=r"unknown layout 'all-9g'; available: all-1g\.10gb, .*, mine"
    ):
        entry_for("all-9g", {"mine": ()}, 0, None, TABLES[H100])


def test_gpu_without_mig_is_left_alone_unless_an_entry_names_it() -> None:
    layouts = {"all": (LayoutEntry(True),), "first": (LayoutEntry(True, devices=(0,)),)}
    for name in ("all-balanced", "all-1g.10gb", "all-enabled", "all-9g", "all"):
        with pytest.raises(NoMigError, match="the GPU has no MIG"):
            entry_for(name, layouts, 0, None, ())
    assert entry_for("first", layouts, 1, None, ()) is None
    assert entry_for("all-disabled", layouts, 0, None, ()) == LayoutEntry(False)
    named = entry_for("first", layouts, 0, None, ())
    assert named is not None
    with pytest.raises(LayoutRefusedError, match="the GPU has no MIG"):
        target_of(named, (), (), ())


def test_indices_of_a_layout_that_the_node_lacks_do_not_count_if_the_entry_has_a_filter() -> None:
    entries = (
        LayoutEntry(False, devices=(0, 4, 2)),
        LayoutEntry(True, devices=(2,)),
        LayoutEntry(True, devices=(7,), filters=("0x233010de",)),
    )
    assert absent_indices("mine", {"mine": entries}, 2) == [2, 4]
    assert absent_indices("mine", {"mine": entries}, 5) == []
    assert absent_indices("all-balanced", {"mine": entries}, 0) == []


def test_the_last_entry_for_a_gpu_counts_and_others_are_left_alone() -> None:
    cut = LayoutEntry(True, {"1g.10gb": 7}, devices=(0, 1))
    whole = LayoutEntry(False, filters=("0x233010de",))
    layouts = {"mixed": (whole, cut)}
    found = [entry_for("mixed", layouts, index, "0x233010de", TABLES[H100]) for index in range(3)]
    assert found == [cut, cut, whole]
    assert entry_for("mixed", layouts, 2, "0x20b010de", TABLES[H100]) is None
    assert entry_for("mixed", layouts, 2, None, TABLES[H100]) is None


def test_layout_that_does_not_fit_is_refused_with_the_nearest_that_fits() -> None:
    entry = LayoutEntry(True, {"3g.40gb": 2, "1g.10gb": 1})
    with pytest.raises(LayoutRefusedError, match=r"the nearest layout that fits is 2 x 3g\.40gb"):
        target_of(entry, TABLES[H100], (), ())
    with pytest.raises(LayoutRefusedError, match=r"no profile 1g\.5gb; its profiles are: 1g\.10gb"):
        target_of(LayoutEntry(True, {"1g.5gb": 1}), TABLES[H100], (), ())
    with pytest.raises(LayoutRefusedError, match=r"nearest layout that fits is 7 x 1g\.10gb"):
        target_of(LayoutEntry(True, {"1g.10gb": 1000}), TABLES[H100], (), ())


def test_instances_that_match_keep_their_place() -> None:
    there = [instance(H100, 1, "1g.10gb", 5), instance(H100, 2, "2g.20gb", 2)]
    entry = LayoutEntry(True, {"3g.40gb": 1, "1g.10gb": 2})
    assert made(H100, entry, there) == [("3g.40gb", 0), ("1g.10gb", 4), ("1g.10gb", 5)]


def test_an_instance_of_ours_moves_where_nothing_fits_next_to_it() -> None:
    there = [instance(H100, 1, "1g.10gb", 1), instance(H100, 2, "1g.10gb", 5)]
    beside = made(H100, LayoutEntry(True, {"3g.40gb": 1, "1g.10gb": 2}), there[:1])
    assert beside == [("1g.10gb", 0), ("1g.10gb", 1), ("3g.40gb", 4)]
    entry = LayoutEntry(True, {"4g.40gb": 1, "1g.10gb": 2})
    assert made(H100, entry, there)[0] == ("4g.40gb", 0)


def test_an_instance_of_someone_else_counts_if_it_matches_and_is_in_the_way_if_not() -> None:
    there = [instance(H100, 7, "1g.10gb", 1)]
    fixed = {there[0].slot}
    assert ("1g.10gb", 1) in made(H100, LayoutEntry(True, {"1g.10gb": 7}), there, fixed)
    in_its_way = LayoutEntry(True, {"4g.40gb": 1, "1g.10gb": 1})
    for entry in (LayoutEntry(True, {"3g.40gb": 2}), LayoutEntry(False), in_its_way):
        with pytest.raises(LayoutRefusedError, match=r"GPU instance 7 .* was created by another program"):
            target_of(entry, TABLES[H100], there, fixed)
    assert target_of(LayoutEntry(True), TABLES[H100], there, fixed).only_mode


def test_the_file_of_mig_parted_is_read_as_the_gpu_operator_has_it() -> None:
    text = """
        version: v1
        mig-configs:
          mode-only: [{devices: all, mig-enabled: true, mig-devices: {}}]
          mixed-inference:
          - {devices: [0, 1], mig-enabled: true, mig-devices: {"1g.10gb": 2, "3g.40gb": 1}}
          - {device-filter: "0x233010DE", devices: [2, 3], mig-enabled: false}
          - {device-filter: ["0x233010DE", "0x20B010DE"], devices: all, mig-enabled: false}
    """
    section = {"layout": "mode-only", "adopt": "destroy", "configuration": yaml.safe_load(text)}
    assert config_values({"migLayouts": section}, Path("x"))["mig_layouts"] == MigLayouts(
        {
            "mode-only": (LayoutEntry(True),),
            "mixed-inference": (
                LayoutEntry(True, {"1g.10gb": 2, "3g.40gb": 1}, (0, 1)),
                LayoutEntry(False, {}, (2, 3), ("0x233010de",)),
                LayoutEntry(False, {}, None, ("0x233010de", "0x20b010de")),
            ),
        },
        "mode-only",
        destroys_foreign=True,
    )


@given(st.data())
def test_no_two_places_overlap_and_the_silicon_takes_what_is_found(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(MODELS)))
    names = [row.profile.name for row in TABLES[key]]
    counts = data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 8), min_size=1, max_size=4))
    fitting = largest_that_fits(counts, TABLES[key])
    assert is_placeable(counts, TABLES[key]) == (dict(fitting) == counts)
    assert built(key, LayoutEntry(True, fitting)) == sum(fitting.values())
