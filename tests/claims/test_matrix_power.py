"""The power fails at any moment in the life of a claim of every kind. The node boots with what its disk may
then hold, and the next instance of the plugin reaches the same state as on a fresh node.

Whichever unsynced writes are lost, no file is unreadable, and what was undone does not return.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.model.claim import AllocatedClaim, Failed, Prepared
from tests.claims.test_matrix_kill import EXPECTED
from tests.fakes.kindnode import KINDS, KindNode, Site
from tests.fakes.powerloss import Disk, Tree
from tests.fakes.samples import claim
from tests.health.test_store import BAD, PART

RECORD = "plugin/claims/uid-1.json"
TREES = 16
"""So many of the contents that a disk may have are tried of each kind of claim."""


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


class Powered:
    """A node with claims of a kind, and what its disk may hold after a power loss, by what was promised until then."""

    def __init__(self, site: Site, directory: Path, name: str) -> None:
        self.site, self.directory, self.kind = site, directory, KINDS[name]
        self.wanted = self.kind.wanted(site)
        self.claims = (*self.kind.beside(site), self.wanted)
        self.empty = self.boot((), "boot-1").state()
        # Lock files say nothing after a boot.
        self.disk = Disk(fresh(directory), {"locks"})
        site.reset()
        with self.disk.recording():
            node = KindNode(site, directory, metadata=self.kind.metadata)
            self.answer = self.prepare(node)
            self.disk.promise("prepared")
            self.disk.promise("unpreparing")
            self.unprepare(node)
            self.disk.promise("unprepared")
        assert node.state() == self.empty

    def prepare(self, node: KindNode) -> Any:
        answers = [node.prepare(one) for one in self.claims]
        assert all(isinstance(answer, Prepared) for answer in answers), answers
        return answers[-1]

    def unprepare(self, node: KindNode) -> None:
        assert [node.unprepare(one) for one in self.claims] == [None] * len(self.claims)

    def boot(self, tree: Tree, boot_id: str = "boot-2") -> KindNode:
        """Boots with what a power loss left on the disk."""
        Disk(fresh(self.directory)).restore(tree)
        self.site.reset()
        return KindNode(self.site, self.directory, boot_id=boot_id, metadata=self.kind.metadata).restarted()

    def trees(self, *promises: str) -> Sequence[Tree]:
        """Some of what the disk may hold, always the same. Every second node has its CDI specs in memory."""
        found = sorted(
            {tree for promise in promises or self.disk.losses for tree in self.disk.losses[promise]},
            key=lambda tree: [(name, content or b"") for name, content in tree],
        )
        chosen = random.Random(0).sample(found, min(TREES, len(found)))
        return [
            tree if number % 2 else tuple(entry for entry in tree if not entry[0].startswith("cdi/"))
            for number, tree in enumerate(chosen)
        ]


@pytest.fixture(params=KINDS)
def powered(request: pytest.FixtureRequest, site: Site, memory_path: Path) -> Powered:
    return Powered(site, memory_path / "node", request.param)


def without_generations(state: dict[str, object]) -> dict[str, object]:
    """A metadata file that names a MIG device has another UUID, and so another generation, after a boot."""
    return {name: re.sub(r'("generation": )\d+', r"\1N", str(seen)) for name, seen in state.items()}


def one_more(wanted: AllocatedClaim) -> AllocatedClaim:
    return claim(*wanted.results, uid="uid-2", configs=wanted.configs)


def test_next_boot_ends_where_a_fresh_node_would(powered: Powered, logs: list[dict[str, Any]]) -> None:
    """Whatever the kubelet requested before, it calls again."""
    node = powered.boot(())
    assert powered.prepare(node) == powered.answer
    uninterrupted = without_generations(node.state())
    logs.clear()
    for tree in powered.trees():
        node = powered.boot(tree)
        powered.unprepare(node)
        assert node.state() == powered.empty, tree
        node = powered.boot(tree)
        assert powered.prepare(node) == powered.answer, tree
        assert without_generations(node.state()) == uninterrupted, tree
        powered.unprepare(node)
        assert node.state() == powered.empty, tree
    reported = {line["event"] for line in logs if line["log_level"] in ("warning", "error")}
    assert reported <= {"driver_files_incomplete"}


def test_undone_steps_of_an_unprepare_do_not_return(powered: Powered) -> None:
    """The kubelet does not call again: nothing remains that holds the device or would never be removed."""
    for tree in powered.trees("unprepared"):
        node = powered.boot(tree)
        assert node.state() == powered.empty, tree
        assert isinstance(node.prepare(one_more(powered.wanted)), Prepared), tree


@pytest.mark.parametrize("powered", [name for name in KINDS if EXPECTED[name]["prepare"]], indirect=True)
def test_record_whose_steps_outlive_files_is_there_once_prepare_answered(powered: Powered) -> None:
    records = {dict(tree).get(RECORD) for tree in powered.disk.losses["prepared"]}
    phases = {json.loads(record or b"{}").get("phase") for record in records}
    # Either will do, as both name every step: that the record says `prepared` is not synced on purpose.
    assert phases == {"preparing", "prepared"}


@pytest.mark.parametrize("powered", ["plain"], indirect=True)
def test_record_that_names_files_only_may_be_lost_since_no_container_outlives_the_power(
    powered: Powered,
) -> None:
    """After a boot the kubelet prepares a claim before it starts a container. Until then the device is
    unused, and another claim may get it, but never two claims.
    """
    other = one_more(powered.wanted)
    lost = [tree for tree in powered.disk.losses["prepared"] if RECORD not in dict(tree)]
    assert lost
    for tree in lost:
        node = powered.boot(tree)
        assert isinstance(node.prepare(other), Prepared), tree
        assert isinstance(node.prepare(powered.wanted), Failed), tree
        assert (node.unprepare(powered.wanted), node.unprepare(other)) == (None, None)
        assert node.state() == powered.empty, tree


@pytest.mark.parametrize("powered", ["MIG on demand"], indirect=True)
def test_mig_mode_that_someone_switches_on_after_the_boot_is_not_taken_for_ours(powered: Powered) -> None:
    """Even if the plugin's own record of this, from the boot before, came back."""
    for tree in powered.trees("prepared"):
        node = powered.boot(tree)
        powered.site.machine.set_mig_mode(7, True)
        node = node.restarted()
        powered.unprepare(node)
        assert bool(powered.site.machine.gpu(7).mig_mode), tree


KEPT = [
    KeptHealth(f"boot-{number}", "580.95.05", states)
    for number, states in enumerate([(), (BAD,), (BAD, PART)])
]


def test_kept_health_may_be_an_older_one_since_the_gpus_are_checked_again_but_is_never_unreadable(
    memory_path: Path, logs: list[dict[str, Any]]
) -> None:
    directory = fresh(memory_path / "disk")
    disk = Disk(directory)
    with disk.recording():
        store = HealthStore(directory / "health.json")
        for kept in KEPT:
            store.save(kept)
    loaded = []
    for tree in disk.losses["nothing"]:
        disk.restore(tree)
        loaded.append(HealthStore(directory / "health.json").load())
    assert all(kept in (None, *KEPT) for kept in loaded)
    assert all(kept in loaded for kept in (None, *KEPT))
    assert logs == []
