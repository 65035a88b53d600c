"""The power goes at any moment in the life of a MIG device that is made on demand.

GPU instances end with the boot, and so does the MIG mode of GPUs on which this driver switches it. That is why ledger
and mode notes may be lost: an entry that is missing speaks of nothing, one that comes back is of an older boot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.machines import SimulatedNode
from tests.fakes.mignode import MigNode, make_idle
from tests.fakes.powerloss import Disk, Tree, covering
from tests.mig.test_crash_matrix import CASES, Case


class Powered:
    """A machine and a disk; `losses` has what the disk may hold after a power loss in the life of one claim."""

    def __init__(self, case: Case, simulated: SimulatedNode, directory: Path) -> None:
        self.case = case
        self.simulated = simulated
        self.directory = directory
        directory.mkdir()
        make_idle(simulated, mig_mode=case.mode)
        self.disk = Disk(directory, {"locks"})
        with self.disk.recording():
            node = MigNode(simulated, directory, boot_id="boot-1")
            self.prepare(node)
            self.disk.promise("prepared")
            self.disk.promise("unpreparing")
            node.unprepare()
            self.disk.promise("unprepared")
        self.losses = self.disk.losses

    def boot(self, tree: Tree) -> MigNode:
        """The next boot, with what a power loss left on the disk."""
        self.disk.restore(tree)
        self.simulated.machine.reboot()
        self.simulated.session.reopen()
        return MigNode(self.simulated, self.directory, boot_id="boot-2")

    def prepare(self, node: MigNode) -> None:
        node.prepare(node.wanted(self.case.profile, self.case.start))

    def clean(self) -> tuple[object, ...]:
        return (self.case.mode, []), set(), set(), {}

    def left(self) -> list[str]:
        return [
            str(path)
            for path in self.directory.rglob("*")
            if path.is_file() and path.parent.name != "locks" and path.name != ".boot"
        ]


@pytest.fixture(scope="module", params=["H100", "A100"])
def powered(request: pytest.FixtureRequest, make_memory_path: Callable[[], Path]) -> Iterator[Powered]:
    case = CASES[request.param]
    simulated = SimulatedNode(case.machine, make_memory_path())
    yield Powered(case, simulated, make_memory_path() / "disk")
    simulated.close()


def everything(powered: Powered) -> list[Tree]:
    return covering(set().union(*powered.losses.values()), 0)


def test_the_disk_may_hold_torn_entries(powered: Powered) -> None:
    """Or the others would not tell what becomes of those."""
    entries = [
        content
        for tree in everything(powered)
        for name, content in tree
        if name.startswith("mig/") and content
    ]
    assert any(content.endswith(b"}") for content in entries)
    assert any(content.startswith(b"{") and not content.endswith(b"}") for content in entries)


def test_prepare_ends_as_on_a_fresh_node(powered: Powered, logs: list[dict[str, object]]) -> None:
    whole = powered.boot(())
    powered.prepare(whole)
    uninterrupted = whole.state()
    for tree in everything(powered):
        node = powered.boot(tree)
        powered.prepare(node)
        assert node.state() == uninterrupted, tree
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []


def test_unprepare_and_the_collector_leave_nothing(powered: Powered, logs: list[dict[str, object]]) -> None:
    """The collector looks once at each start; what an older boot made needs no look at the GPU."""
    for tree in everything(powered):
        node = powered.boot(tree)
        node.unprepare()
        node.settle()
        assert (node.state(), node.collector.stuck(), powered.left()) == (powered.clean(), {}, []), tree
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []


def test_the_record_is_there_once_prepare_answered(powered: Powered) -> None:
    assert all("claims/uid-1.json" in dict(tree) for tree in powered.losses["prepared"])


def test_what_unprepare_took_back_stays_away(powered: Powered) -> None:
    for tree in powered.losses["unprepared"]:
        node = powered.boot(tree)
        node.settle()
        assert (node.state(), powered.left()) == (powered.clean(), []), tree


def test_a_mode_that_somebody_switches_on_after_the_boot_is_not_taken_for_ours(powered: Powered) -> None:
    """Though the note that the driver did so, in the boot before, came back."""
    noted = [tree for tree in powered.losses["prepared"] if any("mig/mode-" in name for name, _ in tree)]
    assert bool(noted) == (not powered.case.mode)
    for tree in noted[:4]:
        node = powered.boot(tree)
        powered.simulated.machine.set_mig_mode(0, True)
        node.work_off()
        assert node.on_gpu() == (True, [])
        assert node.ledger.owned_modes() == {}
