"""The process dies after every change that lasts, for every kind of claim; the next instance ends where an
uninterrupted one would.

Changes that last are renames and removals of files, writes to locks, and what is done to GPUs and MPS daemons. What a
power loss leaves is another matter (test_power_loss.py). Each start looks after the MIG ledger first, as the daemon
does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.model.claim import Prepared
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from tests.fakes.kindnode import EFFECTS, KINDS, KindNode, Saved, Site
from tests.fakes.preparing import Crash

XID = Reason("xid", "48", Severity.UNHEALTHY, 100, 120, "Xid 48: double-bit ECC error")
State = dict[str, object]


@dataclass
class Case:
    """One kind on nodes of its own, each like the other before anything is done for the claim."""

    site: Site
    directory: Path
    name: str
    _begun: dict[str, tuple[KindNode, Saved]] = field(default_factory=dict)

    def fresh(self) -> KindNode:
        return self._again("fresh", self._first)

    def _again(self, name: str, first: Callable[[], KindNode]) -> KindNode:
        """What `first` makes, from the second time on a copy of all that it left."""
        copy = self.directory.with_name(name)
        if name not in self._begun:
            self._begun[name] = first(), self.site.saved()
            shutil.copytree(self.directory, copy)
        node, saved = self._begun[name]
        self.site.put_back(saved)
        shutil.rmtree(self.directory)
        shutil.copytree(copy, self.directory)
        return node.again()

    def _first(self) -> KindNode:
        kind = KINDS[self.name]
        self.site.reset()
        shutil.rmtree(self.directory, ignore_errors=True)
        node = KindNode(self.site, self.directory, metadata=kind.metadata)
        HealthStore(node.plugin / "health.json").save(
            KeptHealth("boot-1", None, (HealthState(HealthTarget(self.site.gpu(2).uuid), (XID,)),))
        )
        for other in kind.beside(self.site):
            assert isinstance(node.prepare(other), Prepared)
        return node

    def prepare(self, node: KindNode) -> object:
        return node.prepare(KINDS[self.name].wanted(self.site))

    def unprepare(self, node: KindNode) -> object:
        return node.unprepare(KINDS[self.name].wanted(self.site))

    def untouched(self) -> State:
        return self.fresh().state()

    def uninterrupted(self) -> tuple[object, State]:
        node = self.fresh()
        answer = self.prepare(node)
        assert isinstance(answer, Prepared), answer
        return answer, node.state()

    def dead_prepares(self, *, rolls: bool = False) -> Iterator[tuple[str, KindNode]]:
        """The next instance after a death at each change of a Prepare; with `rolls` the other instance of a rolling
        update, which has run all the time."""
        yield from self._deaths(self.fresh, self.prepare, rolls=rolls)

    def dead_unprepares(self, *, rolls: bool = False) -> Iterator[tuple[str, KindNode]]:
        yield from self._deaths(self.prepared, self.unprepare, rolls=rolls)

    def _prepared(self) -> KindNode:
        node = self.fresh()
        self.prepare(node)
        return node

    def prepared(self) -> KindNode:
        return self._again("prepared", self._prepared)

    def _deaths(
        self, begin: Callable[[], KindNode], call: Callable[[KindNode], object], *, rolls: bool
    ) -> Iterator[tuple[str, KindNode]]:
        node = begin()
        with node.dying(None) as changes:
            call(node)
        assert changes
        for number, change in enumerate(list(changes), 1):
            if change == "fsync":
                continue  # what a process leaves by its death is the same before
            node = begin()
            other = node.again() if rolls else None
            with node.dying(number) as done, pytest.raises(Crash):
                call(node)
            assert done == changes[:number], "the same call makes the same changes"
            yield f"{number}: {change}", other or node.restarted()


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, site: Site, memory_path: Path) -> Case:
    return Case(site, memory_path / "node", request.param)


EXPECTED = yaml.safe_load(Path(__file__).with_name("effects.yaml").read_text())


def test_the_matrix_covers_every_effect_and_every_write(case: Case) -> None:
    untouched = case.untouched()
    node = case.fresh()
    with node.dying(None) as changes:
        case.prepare(node)
    assert [change for change in changes if change in EFFECTS] == EXPECTED[case.name]["prepare"]
    assert changes.count("replace") >= 3, "the record twice, and the CDI spec"
    assert node.state() != untouched
    with node.dying(None) as changes:
        case.unprepare(node)
    assert [change for change in changes if change in EFFECTS] == EXPECTED[case.name]["unprepare"]
    assert changes.count("unlink") >= 2
    assert node.state() == untouched


def test_prepare_goes_on_where_the_one_before_died(case: Case) -> None:
    untouched, expected = case.untouched(), case.uninterrupted()
    for point, node in case.dead_prepares():
        assert (case.prepare(node), node.state()) == expected, point
        assert case.unprepare(node) is None, point
        assert node.state() == untouched, point


def test_unprepare_takes_back_what_a_dead_prepare_left(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.dead_prepares():
        assert (case.unprepare(node), node.state()) == (None, untouched), point


def test_unprepare_goes_on_where_the_one_before_died(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.dead_unprepares():
        assert (case.unprepare(node), node.state()) == (None, untouched), point


def test_prepare_after_a_dead_unprepare_ends_as_if_it_never_was(case: Case) -> None:
    expected = case.uninterrupted()
    for point, node in case.dead_unprepares():
        assert (case.prepare(node), node.state()) == expected, point


def test_the_other_instance_of_a_rolling_update_takes_back_what_a_dead_one_left(case: Case) -> None:
    untouched = case.untouched()
    for deaths in (case.dead_prepares, case.dead_unprepares):
        for point, other in deaths(rolls=True):
            assert other.lanes.hanging() == {}, point
            assert case.unprepare(other) is None, point
            assert other.cleaner.clean_all() == [], point
            other.work_off()
            assert other.state() == untouched, point


def test_an_instance_that_starts_while_nvml_is_detached_takes_back_when_that_is_over(case: Case) -> None:
    untouched = case.untouched()
    for deaths in (case.dead_prepares, case.dead_unprepares):
        for point, node in deaths(rolls=True):
            left = [gpu[:2] + gpu[3:] for gpu in case.site.settings()]
            with case.site.detached():
                following = node.again()
                following.work_off()
                following.cleaner.clean_all()
                assert case.unprepare(following) is None, point
                following.work_off()
                following.cleaner.clean_all()
                # The MPS host, which is a process of its own here as well, waits with compute modes by itself.
                assert [gpu[:2] + gpu[3:] for gpu in case.site.settings()] == left, point
            assert following.cleaner.clean_all() == [], point
            following.work_off()
            if following.collector.gpus():
                following.clock.pause(31)  # for so long an instance is expected whose creation nobody saw end
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


@pytest.mark.parametrize("case", ["MIG on demand", "MIG on demand beside another"], indirect=True)
@pytest.mark.parametrize("call", ["prepare", "unprepare"])
def test_start_clears_a_mig_device_away_whose_record_was_lost(case: Case, call: str) -> None:
    untouched = case.untouched()["GPUs"]
    for point, node in case.dead_prepares() if call == "prepare" else case.dead_unprepares():
        node.records.delete(KINDS[case.name].wanted(case.site).ref.uid)
        node.specs.remove(KINDS[case.name].wanted(case.site).ref.uid)
        following = node.restarted()
        assert (following.state()["GPUs"], following.collector.stuck()) == (untouched, {}), point
