"""Processes with unclaimed memory on a GPU: reported once, after ten minutes, and never stopped."""

from __future__ import annotations

import pytest

from dra_driver.errors import StateError
from dra_driver.model.gpu import GpuProcess
from dra_driver.reporting.usage import UnclaimedMemory
from tests.fakes.samples import uuid

TRAIN, OTHER = GpuProcess(4711, "train", 2 << 30), GpuProcess(4712, "other")


class Node:
    """One GPU, checked every two seconds."""

    def __init__(self) -> None:
        self.found: dict[str, list[GpuProcess]] | None = {uuid(0): []}
        self.fails = False
        self.now = self.looks = 0
        self.watch = UnclaimedMemory(self.look, lambda: self.now)

    def look(self) -> dict[str, list[GpuProcess]]:
        self.looks += 1
        if self.fails:
            raise StateError("no records")
        return self.found or {}

    def after(self, minutes: int) -> list[str]:
        """Return the subjects of the problems at the end of that time."""
        for _ in range(30 * minutes):
            self.now += 2
            problems = self.watch.problems()
        assert {problem.code for problem in problems} <= {"memory-unclaimed"}
        return [problem.subject for problem in problems]

    def has(self, *processes: GpuProcess) -> None:
        self.found = {uuid(0): [*processes]}


@pytest.fixture
def node() -> Node:
    return Node()


def subject(process: GpuProcess) -> str:
    return f"process {process.pid} ({process.name}) on GPU {uuid(0)}"


def test_process_is_a_problem_after_ten_minutes_until_it_ends(node: Node) -> None:
    node.has(TRAIN)
    assert node.after(10) == []
    assert node.after(1) == [subject(TRAIN)]
    assert node.looks == 11
    node.has(TRAIN, OTHER)
    assert node.after(10) == [subject(TRAIN)]
    assert node.after(1) == [subject(TRAIN), subject(OTHER)]
    node.has(OTHER)
    assert node.after(1) == [subject(OTHER)]


def test_process_that_ends_and_comes_back_starts_over(node: Node) -> None:
    node.has(TRAIN)
    node.after(10)
    node.has()
    node.after(1)
    node.has(TRAIN)
    assert node.after(10) == []
    assert node.after(1) == [subject(TRAIN)]
    other = GpuProcess(4711, "another program")
    node.has(other)
    assert (node.after(10), node.after(1)) == ([], [subject(other)])


def test_gpu_that_does_not_answer_changes_nothing(node: Node) -> None:
    node.has(TRAIN)
    node.after(5)
    node.found = None
    assert node.after(5) == []
    node.has(TRAIN)
    assert node.after(1) == [subject(TRAIN)]
    node.found = None
    assert node.after(1) == [subject(TRAIN)]


def test_look_that_fails_is_repeated(node: Node) -> None:
    node.has(TRAIN)
    node.fails = True
    for _ in range(2):
        node.now += 2
        with pytest.raises(StateError):
            node.watch.problems()
    node.fails = False
    node.after(1)
    assert node.looks == 3
