"""Processes with unclaimed memory on a GPU: reported once, after ten minutes, and never stopped."""

from __future__ import annotations

import pytest

from dra_driver.errors import StateError
from dra_driver.model.gpu import GpuProcess
from dra_driver.reporting.usage import UnclaimedMemory
from tests.fakes.samples import uuid

TRAIN, OTHER = GpuProcess(4711, "train", 2 << 30), GpuProcess(4712, "other")


class Node:
    """One GPU, checked every minute."""

    def __init__(self) -> None:
        self.found: dict[str, list[GpuProcess]] | None = {uuid(0): []}
        self.fails = False
        self.now = 0.0
        self.reported: list[int] = []
        self.watch = UnclaimedMemory(self.look, self.report, lambda: self.now)

    def look(self) -> dict[str, list[GpuProcess]]:
        if self.fails:
            raise StateError("no records")
        return self.found or {}

    def report(self, gpu_uuid: str, process: GpuProcess) -> None:
        assert gpu_uuid == uuid(0)
        self.reported.append(process.pid)

    def after(self, minutes: int) -> list[int]:
        """Returns the reports of that time."""
        self.reported.clear()
        for _ in range(minutes):
            self.now += self.watch.turn()
        return self.reported

    def has(self, *processes: GpuProcess) -> None:
        self.found = {uuid(0): [*processes]}


@pytest.fixture
def node() -> Node:
    return Node()


def test_process_is_reported_once_after_ten_minutes(node: Node) -> None:
    node.has(TRAIN)
    assert node.after(10) == []
    assert node.after(1) == [4711]
    assert node.after(60) == []
    node.has(TRAIN, OTHER)
    assert node.after(11) == [4712]


def test_process_that_ends_and_comes_back_starts_over(node: Node) -> None:
    node.has(TRAIN)
    node.after(10)
    node.has()
    node.after(1)
    node.has(TRAIN)
    assert node.after(10) == []
    assert node.after(1) == [4711]
    node.has(GpuProcess(4711, "another program"))
    assert (list(node.after(10)), list(node.after(1))) == ([], [4711])


def test_gpu_that_does_not_answer_changes_nothing(node: Node) -> None:
    node.has(TRAIN)
    node.after(5)
    node.found = None
    assert node.after(5) == []
    node.fails = True
    assert node.after(5) == []
    node.fails = False
    node.has(TRAIN)
    assert node.after(1) == [4711]
    node.found = None
    node.after(1)
    node.has(TRAIN)
    assert node.after(1) == []
