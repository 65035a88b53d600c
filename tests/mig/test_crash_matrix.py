"""The process dies after every change of a creation and of a destruction; the next instance ends where an
uninterrupted one would. `tests/claims/test_crash_matrix_kinds.py` has the single deaths; here are those of a repair, of
a start, and of tries within one call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import NvmlTransientError
from tests.fakes.machines import SimulatedNode
from tests.fakes.mignode import MigNode, make_idle
from tests.fakes.preparing import Crash


@dataclass(frozen=True)
class Case:
    """A GPU with its MIG mode before, a profile, and how many changes a Prepare and an Unprepare make."""

    machine: str
    mode: bool
    profile: str
    start: int

    @property
    def prepare(self) -> int:
        return 8 if self.mode else 10

    @property
    def unprepare(self) -> int:
        return 5 if self.mode else 7


CASES = {
    "A100": Case("dgx-a100-40gb", True, "3g.20gb", 4),
    "H100": Case("dgx-h100", False, "1g.10gb", 3),
    "B200": Case("dgx-b200", False, "2g.45gb", 2),
    "A30": Case("a30-4", True, "2g.12gb", 2),
    "RTX PRO 6000": Case("rtx-pro-6000-8", False, "1g.24gb+gfx", 1),
}


@pytest.fixture(scope="module")
def machines(make_memory_path: Callable[[], Path]) -> Iterator[Callable[[str], SimulatedNode]]:
    """Each machine once, since rendering one takes longer than a test."""
    made: dict[str, SimulatedNode] = {}

    def one(name: str) -> SimulatedNode:
        if name not in made:
            made[name] = SimulatedNode(name, make_memory_path())
        return made[name]

    yield one
    for node in made.values():
        node.close()


@pytest.fixture
def fresh(machines: Callable[[str], SimulatedNode], tmp_path: Path) -> Callable[[Case], MigNode]:
    """A node on which nothing was done yet."""
    count = 0

    def one(case: Case) -> MigNode:
        nonlocal count
        count += 1
        simulated = machines(case.machine)
        make_idle(simulated, mig_mode=case.mode)
        return MigNode(simulated, tmp_path / str(count))

    return one


def wanted(node: MigNode, case: Case):
    return node.wanted(case.profile, case.start)


def die_in(node: MigNode, call: Callable[[], object], changes: int) -> MigNode:
    with node.dying_after(changes), pytest.raises(Crash):
        call()
    return node.restarted()


def dead(fresh: Callable[[Case], MigNode], case: Case, call: str, changes: int) -> MigNode:
    """The instance after one that died in a call."""
    node = fresh(case)
    if call == "prepare":
        return die_in(node, lambda: node.prepare(wanted(node, case)), changes)
    node.prepare(wanted(node, case))
    return die_in(node, node.unprepare, changes)


def untouched(case: Case) -> tuple[object, ...]:
    return (case.mode, []), set(), set(), {}


@pytest.fixture(scope="module")
def known_ends() -> dict[object, tuple[object, ...]]:
    return {}


@pytest.fixture
def uninterrupted(
    fresh: Callable[[Case], MigNode], known_ends: dict[object, tuple[object, ...]]
) -> Callable[[Case], tuple[object, ...]]:
    """Where a Prepare ends that nothing interrupts; it is asked for before the node that is interrupted."""

    def end(case: Case) -> tuple[object, ...]:
        if case not in known_ends:
            node = fresh(case)
            node.prepare(wanted(node, case))
            known_ends[case] = node.state()
        return known_ends[case]

    return end


@pytest.mark.parametrize("name", CASES)
def test_the_matrix_covers_every_change(fresh, name: str) -> None:
    case = CASES[name]
    node = fresh(case)
    node.prepare(wanted(node, case))
    mode = [] if case.mode else ["own_mode", "set_mode"]
    made = ["save", "create", "save", "create_compute", "save"]
    assert node.countdown.done == ["save", "add", *mode, *made, "save"]
    assert len(node.countdown.done) == case.prepare
    (_, instances), entries, modes, _ = node.state()
    assert [(start, computes) for _, _, start, computes in instances] == [(case.start, 1)]
    assert [(entry[1], entry[-1]) for entry in entries] == [("created", True)]
    assert len(modes) == (0 if case.mode else 1)
    node.countdown.done.clear()
    node.unprepare()
    mode = [] if case.mode else ["set_mode", "disown_mode"]
    assert node.countdown.done == ["delete", "destroy_compute", "destroy", "delete", *mode, "change"]
    assert len(node.countdown.done) == case.unprepare
    assert node.state() == untouched(case)


@pytest.mark.parametrize("changes", range(1, CASES["H100"].prepare + 1))
def test_other_claims_get_the_place_of_a_dead_prepare(fresh, changes: int) -> None:
    """The kubelet unprepares the dead one; a bigger device that covers its slot fits then."""
    node = dead(fresh, CASES["H100"], "prepare", changes)
    node.unprepare()
    node.prepare(node.wanted("7g.80gb", 0), uid="uid-2")
    assert [row[1:] for row in node.on_gpu()[1]] == [(0, 0, 1)]


@pytest.mark.parametrize("changes", [1, 2, 3])
def test_repair_of_a_device_without_compute_instance_may_die(fresh, uninterrupted, changes: int) -> None:
    case = CASES["H100"]
    expected = uninterrupted(case)
    node = dead(fresh, case, "unprepare", 2)
    node = die_in(node, lambda: node.prepare(wanted(node, case)), changes)
    node.prepare(wanted(node, case))
    assert node.state() == expected
    node.unprepare()
    assert node.state() == untouched(case)


@pytest.mark.parametrize("changes", range(1, 6))
def test_a_start_that_dies_while_it_clears_up_is_gone_on_with(fresh, changes: int) -> None:
    case = CASES["H100"]
    node = fresh(case)
    node.prepare(wanted(node, case))
    node = node.restarted()
    node.records.delete("uid-1")
    node = die_in(node, node.work_off, changes)
    node.work_off()
    assert node.state() == untouched(case)


# --- refused and tried again within a call, with a device that is finished before ----------------

SIBLINGS = {"H100": ("1g.10gb", 6), "A30": ("1g.6gb", 0)}
REFUSED_CREATIONS = {"GPU": "create", "compute": "create_compute"}
FIRST_TRY = {"GPU": 10, "compute": 13}
"""How many changes a try makes until it waits, on a GPU whose MIG mode was on before."""
NEXT_TRY = 6
ROLL_BACK = 5


def mode_changes(name: str) -> int:
    return 0 if CASES[name].mode else 2


EVERY_PAIR = [(name, what) for name in SIBLINGS for what in REFUSED_CREATIONS]
EVERY_CHANGE_OF_TWO_TRIES = [
    (name, what, changes)
    for name, what in EVERY_PAIR
    for changes in range(1, FIRST_TRY[what] + mode_changes(name) + NEXT_TRY + 1)
]


class PairNode:
    """A node on which the second device of a claim is refused once."""

    def __init__(self, node: MigNode, name: str, what: str) -> None:
        self.node = node
        self.name = name
        self._calls = 0
        self._make = getattr(node.hardware, REFUSED_CREATIONS[what])
        setattr(node.hardware, REFUSED_CREATIONS[what], self._refusing)

    def _refusing(self, *arguments: Any) -> Any:
        self._calls += 1
        if self._calls == 2:
            raise NvmlTransientError("Insufficient Resources")
        return self._make(*arguments)

    def try_(self, node: MigNode | None = None) -> None:
        node = node or self.node
        case = CASES[self.name]
        sibling = node.wanted(*SIBLINGS[self.name])
        node.prepare(sibling, "uid-1", wanted(node, case), tries_again=True)

    def try_twice(self) -> None:
        with pytest.raises(NvmlTransientError):
            self.try_()
        self.try_()

    def give_up(self) -> None:
        self.node.unprepare()


@pytest.fixture
def pair(fresh) -> Callable[[str, str], PairNode]:
    return lambda name, what: PairNode(fresh(CASES[name]), name, what)


@pytest.mark.parametrize(("name", "what"), EVERY_PAIR)
def test_next_try_goes_on_where_the_refused_one_stopped(pair, name: str, what: str) -> None:
    ends = []
    for is_refused in (False, True):
        refused = pair(name, what)
        if is_refused:
            with pytest.raises(NvmlTransientError):
                refused.try_()
            done = refused.node.countdown.done
            assert len(done) == FIRST_TRY[what] + mode_changes(name)
            (is_on, instances), entries, modes, records = refused.node.state()
            assert (is_on, [row[3] for row in instances], len(entries), len(modes)) == (
                True, [1], 1, mode_changes(name) // 2,
            )  # fmt: skip
            assert [record.phase for record in records.values()] == ["preparing"]
            done.clear()
            refused.try_()
            assert done == ["save", "create", "save", "create_compute", "save", "save"]
            assert len(done) == NEXT_TRY
        else:
            refused._calls = 2
            refused.try_()
        ends.append(refused.node.state())
    assert ends[0] == ends[1]


FOLLOWS = pytest.mark.parametrize("follows", ["prepare", "unprepare", "a start without the record"])


def ends_clean(refused: PairNode, node: MigNode, follows: str, end: object) -> None:
    """The next Prepare ends where an uninterrupted one does, a start before it changes nothing; the Unprepare after
    that, or instead, leaves nothing, and so does a start without the record."""
    if follows == "prepare":
        before = node.state()
        node.work_off()
        assert end is None or node.state() == before
        refused.try_(node)
        assert end in (None, node.state())
        assert [row[3] for row in node.on_gpu()[1]] == [1, 1]
    if follows == "a start without the record":
        node.records.delete("uid-1")
    else:
        node.unprepare()
    assert node.cleaner.clean_all() == []
    node.work_off()
    assert node.state() == untouched(CASES[refused.name])


@FOLLOWS
@pytest.mark.parametrize(("name", "what", "changes"), EVERY_CHANGE_OF_TWO_TRIES)
def test_death_in_or_between_two_tries_is_gone_on_with(
    pair, known_ends, name: str, what: str, changes: int, follows: str
) -> None:
    if (name, what) not in known_ends:
        expected = pair(name, what)
        expected.try_twice()
        known_ends[name, what] = expected.node.state()
    refused = pair(name, what)
    node = die_in(refused.node, refused.try_twice, changes)
    ends_clean(refused, node, follows, known_ends[name, what])


@FOLLOWS
@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, changes) for name in SIBLINGS for changes in range(1, ROLL_BACK + mode_changes(name) + 1)],
)
def test_death_while_it_gives_up_is_gone_on_with(pair, name: str, changes: int, follows: str) -> None:
    refused = pair(name, "GPU")
    with pytest.raises(NvmlTransientError):
        refused.try_()
    node = die_in(refused.node, refused.give_up, changes)
    if changes == ROLL_BACK + mode_changes(name):
        assert node.state() == untouched(CASES[name]), "that was the last change"
    ends_clean(refused, node, follows, None)


def killed_after(node: MigNode, call: Callable[[], object], changes: int) -> None:
    """Run in a process of its own, which is killed after so many changes."""
    child = os.fork()
    if child == 0:
        try:
            node.countdown.die = lambda: os.kill(os.getpid(), signal.SIGKILL)
            node.countdown.left = changes
            call()
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("changes", [3, 5, 7])
def test_a_killed_process_holds_no_lock_and_leaves_nothing_half_written(
    fresh, uninterrupted, changes: int
) -> None:
    case = CASES["H100"]
    expected = uninterrupted(case)
    node = fresh(case)
    killed_after(node, lambda: node.prepare(wanted(node, case)), changes)
    following = node.restarted()
    following.prepare(wanted(following, case))
    assert following.state() == expected
    killed_after(following, following.unprepare, changes // 2)
    last = following.restarted()
    last.unprepare()
    last.settle()
    assert last.state() == untouched(case)
