"""A kind of claim on separate nodes that are identical before the claim is prepared: the base of the tests of
kills, power losses and hangs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.model.claim import AllocatedClaim, Prepared
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from tests.fakes.kindnode import KINDS, Change, KindNode, Saved, Site
from tests.fakes.preparing import Crash

BOOTS = ("first boot", "second boot")
XID = Reason("xid", "48", Severity.UNHEALTHY, 100, 120, "Xid 48: double-bit ECC error")
State = dict[str, object]
T = TypeVar("T")


@dataclass
class Case:
    """In the second boot the claim was prepared before the node was rebooted: its record says what it gets, and nothing
    of that is done."""

    site: Site
    directory: Path
    name: str
    boot: str = BOOTS[0]
    _begun: dict[str, tuple[KindNode, Saved]] = field(default_factory=dict)

    @property
    def wanted(self) -> AllocatedClaim:
        return KINDS[self.name].wanted(self.site)

    def fresh(self) -> KindNode:
        return self._again("fresh", self._first)

    def prepared(self) -> KindNode:
        return self._again("prepared", self._prepared)

    def _again(self, name: str, first: Callable[[], KindNode]) -> KindNode:
        """Return the result of `first`; from the second time on a copy of everything that it left."""
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
        if self.boot != BOOTS[0]:
            assert isinstance(node.prepare(self.wanted), Prepared)
            self.site.reset()
            node = node.restarted(boot_id="boot-2")
            assert node.record_of(self.wanted.ref.uid).phase == "preparing"
        for other in kind.beside(self.site):
            assert isinstance(node.prepare(other), Prepared)
        return node

    def _prepared(self) -> KindNode:
        node = self.fresh()
        assert isinstance(self.prepare(node), Prepared)
        return node

    def prepare(self, node: KindNode) -> object:
        return node.prepare(self.wanted)

    def unprepare(self, node: KindNode) -> object:
        return node.unprepare(self.wanted)

    def _once(self, what: str, find: Callable[[], T]) -> T:
        """Return what the first test of the module found: the others would find the same."""
        key = self.name, self.boot, what
        if key not in self.site.found:
            self.site.found[key] = find()
        found: T = self.site.found[key]
        return found

    def untouched(self) -> State:
        """The state after every Unprepare."""

        def find() -> State:
            node = self.fresh()
            assert self.unprepare(node) is None
            return node.state()

        return self._once("untouched", find)

    def uninterrupted(self) -> tuple[object, State]:
        """Return the response of an uninterrupted Prepare, and the state after it."""

        def find() -> tuple[object, State]:
            node = self.fresh()
            answer = self.prepare(node)
            assert isinstance(answer, Prepared), answer
            return answer, node.state()

        return self._once("uninterrupted", find)

    def dead_prepares(self, *, starts: bool = True) -> Iterator[tuple[str, KindNode]]:
        """The next instance after a death at each change of a Prepare, or the dead one if the next one does not start
        yet."""
        yield from self._deaths(self.fresh, self.prepare, starts=starts)

    def dead_unprepares(self, *, starts: bool = True) -> Iterator[tuple[str, KindNode]]:
        yield from self._deaths(self.prepared, self.unprepare, starts=starts)

    def failing(
        self, begin: Callable[[], KindNode], call: Callable[[KindNode], object]
    ) -> Iterator[tuple[str, KindNode]]:
        """The same instance after a call of which one change failed, each in turn."""
        for change in self._changes(begin, call):
            node = begin()
            with node.dying(change, fault=True):
                call(node)
            yield str(change), node

    def _deaths(
        self, begin: Callable[[], KindNode], call: Callable[[KindNode], object], *, starts: bool
    ) -> Iterator[tuple[str, KindNode]]:
        for change in self._changes(begin, call):
            if change.name == "fsync":
                continue  # the state after the process's death is the same before it
            node = begin()
            with node.dying(change) as done, pytest.raises(Crash):
                call(node)
            assert change in done, "the same call makes the same changes"
            yield str(change), node.restarted() if starts else node

    def _changes(self, begin: Callable[[], KindNode], call: Callable[[KindNode], object]) -> list[Change]:
        """Return the changes of the call. Of several lanes with the same changes, only one counts."""

        def find() -> list[Change]:
            node = begin()
            with node.dying(None) as changes:
                call(node)
            assert changes
            by_lane = {
                lane: [change for change in changes if change.lane == lane]
                for lane in sorted({change.lane for change in changes}, key=sorted)
            }
            different = {tuple(change.name for change in found): found for found in by_lane.values()}
            return [change for found in different.values() for change in found]

        return self._once(call.__name__, find)
