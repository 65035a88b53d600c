"""The process dies after every durable change, for every kind of claim; the next instance reaches the same
state as an uninterrupted one.

Durable changes are renames and removals of files, writes to locks, and changes of GPUs and MPS daemons. Power
loss is tested separately (test_matrix_power.py). Each start reads the MIG ledger first, like the daemon.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from dra_driver.model.claim import Failed, Prepared
from dra_driver.model.steps import STEPS
from tests.fakes.kindnode import EFFECTS, KINDS, Site, sharing
from tests.fakes.matrix import BOOTS, Case
from tests.fakes.preparing import Crash
from tests.fakes.samples import claim, plan
from tests.fakes.tables import read_yaml

in_each_boot = pytest.mark.parametrize("boot", BOOTS)


@pytest.fixture
def boot() -> str:
    return BOOTS[0]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, site: Site, memory_path: Path, boot: str) -> Case:
    return Case(site, memory_path / "node", request.param, boot)


EXPECTED = read_yaml(Path(__file__).with_name("effects.yaml"))


def test_every_kind_of_step_has_a_kind_of_claim(site: Site) -> None:
    plans = [
        plan(kind.wanted(site), found=site.inventory, sharing=sharing(site), metadata=kind.metadata)
        for kind in KINDS.values()
    ]
    assert {type(step) for one in plans for step in one.steps} == set(STEPS)


def test_the_matrix_covers_every_effect_and_every_write(case: Case) -> None:
    untouched, lanes = case.untouched(), EXPECTED[case.name].get("lanes", 1)
    node = case.fresh()
    with node.dying(None) as changes:
        case.prepare(node)
    assert [one.name for one in changes if one.name in EFFECTS] == EXPECTED[case.name]["prepare"] * lanes
    assert [one.name for one in changes].count("replace") >= 3, "the record twice, and the CDI spec"
    assert node.state() != untouched
    with node.dying(None) as changes:
        case.unprepare(node)
    assert [one.name for one in changes if one.name in EFFECTS] == EXPECTED[case.name]["unprepare"] * lanes
    assert [one.name for one in changes].count("unlink") >= 2
    assert node.state() == untouched


@in_each_boot
def test_prepare_continues_where_the_one_before_died(case: Case) -> None:
    untouched, expected = case.untouched(), case.uninterrupted()
    for point, node in case.dead_prepares():
        assert (case.prepare(node), node.state()) == expected, point
        assert case.unprepare(node) is None, point
        assert node.state() == untouched, point


@in_each_boot
def test_unprepare_undoes_what_a_dead_prepare_left(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.dead_prepares():
        assert (case.unprepare(node), node.state()) == (None, untouched), point


def test_unprepare_continues_where_the_one_before_died(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.dead_unprepares():
        assert (case.unprepare(node), node.state()) == (None, untouched), point


def test_prepare_after_a_dead_unprepare_ends_as_if_it_never_was(case: Case) -> None:
    expected = case.uninterrupted()
    for point, node in case.dead_unprepares():
        assert (case.prepare(node), node.state()) == expected, point


@pytest.mark.parametrize("case", [name for name in KINDS if EXPECTED[name]["unprepare"]], indirect=True)
def test_an_instance_that_starts_while_nvml_is_detached_undoes_when_that_is_over(case: Case) -> None:
    untouched = case.untouched()
    for deaths in (case.dead_prepares, case.dead_unprepares):
        for point, node in deaths(starts=False):
            left = [gpu[:2] + gpu[3:] for gpu in case.site.settings()]
            with case.site.detached():
                following = node.again()
                following.cleaner.clear_temporary()  # of lanes that were writing a file when another one died
                following.work_off()
                assert case.unprepare(following) is None, point
                following.work_off()
                # The MPS host, which is a separate process here too, waits with compute modes on its own.
                assert [gpu[:2] + gpu[3:] for gpu in case.site.settings()] == left, point
            following.work_off()
            if following.ledger.pending():
                following.clock.pause(
                    31
                )  # an instance whose creation has an unknown outcome is expected for that long
                following.work_off()
            assert following.state() == untouched, point


@pytest.mark.parametrize("case", ["several requests", "MIG on demand"], indirect=True)
def test_second_prepare_may_die_as_well(case: Case) -> None:
    untouched, expected = case.untouched(), case.uninterrupted()
    for number, (point, node) in enumerate(case.dead_prepares(), 1):
        with node.dying(number), suppress(Crash):
            case.prepare(node)
        third = node.restarted()
        assert (case.prepare(third), third.state()) == expected, point
        assert (case.unprepare(third), third.state()) == (None, untouched), point


@pytest.mark.parametrize("case", ["MIG on demand", "second MIG on demand"], indirect=True)
@pytest.mark.parametrize("call", ["prepare", "unprepare"])
def test_start_clears_a_mig_device_away_whose_record_was_lost(case: Case, call: str) -> None:
    untouched = case.untouched()["GPUs"]
    for point, node in case.dead_prepares() if call == "prepare" else case.dead_unprepares():
        node.records.delete(case.wanted.ref.uid)
        node.specs.remove(case.wanted.ref.uid)
        following = node.restarted()
        assert (following.state()["GPUs"], following.ledger.pending()) == (untouched, []), point


@pytest.mark.parametrize("case", ["MIG on demand"], indirect=True)
def test_start_that_dies_while_it_clears_a_mig_device_away_is_completed_by_the_next(case: Case) -> None:
    untouched = case.untouched()["GPUs"]
    for number in range(1, 100):
        node = case.prepared()
        node.records.delete(case.wanted.ref.uid)
        node.specs.remove(case.wanted.ref.uid)
        following = node.again()
        with following.dying(number) as done, suppress(Crash):
            following.work_off()
        assert node.restarted().state()["GPUs"] == untouched, number
        if len(done) < number:
            break
    assert number > len(EXPECTED[case.name]["unprepare"])


@pytest.mark.parametrize("case", ["plain", "metadata"], indirect=True)
def test_devices_of_a_dead_prepare_are_not_given_away(case: Case) -> None:
    other = claim(case.site.whole(2), uid="uid-2")
    for point, node in case.dead_prepares():
        is_held = node.records.get(case.wanted.ref.uid) is not None
        answer = node.prepare(other)
        assert isinstance(answer, Failed if is_held else Prepared), point
        assert not is_held or "is held by claim default/claim-uid-1 (UID uid-1)" in answer.error, point


@pytest.mark.parametrize(
    "case",
    ["plain", "several requests", "MIG on demand with MPS and metadata", "virtual machine"],
    indirect=True,
)
def test_prepare_with_another_allocation_leaves_nothing_of_the_dead_one(case: Case) -> None:
    other = claim(case.site.whole(4))
    expected = case.fresh()
    assert isinstance(expected.prepare(other), Prepared)
    end = expected.state()
    for point, node in case.dead_prepares():
        assert isinstance(node.prepare(other), Prepared), point
        assert (node.cleaner.clean_all(), node.state()) == ([], end), point


@pytest.mark.parametrize("case", ["metadata"], indirect=True)
def test_unprepare_leaves_nothing_of_a_dead_prepare_when_metadata_is_switched_off_then(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.dead_prepares():
        following = node.again(metadata=())
        assert (case.unprepare(following), following.state()) == (None, untouched), point
