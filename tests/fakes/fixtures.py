"""Fixtures that several folders share; a folder's conftest.py imports the ones that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from tests.fakes.machines import SimulatedNode
from tests.fakes.preparing import Node
from tests.fakes.samples import MIXED


@pytest.fixture(autouse=True)
def logs():
    """Log lines are kept, not printed."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, MIXED)


@pytest.fixture(scope="module")
def h100(make_memory_path: Callable[[], Path]) -> Iterator[SimulatedNode]:
    """A machine for all tests of a file, since rendering one takes longer than a test."""
    made = SimulatedNode("dgx-h100", make_memory_path())
    yield made
    made.close()


@pytest.fixture
def machine(memory_path: Path) -> Iterator[Callable[[str], SimulatedNode]]:
    """Create simulated machines, and restore the binding after the test."""
    made: list[SimulatedNode] = []

    def make(name: str) -> SimulatedNode:
        made.append(SimulatedNode(name, memory_path / str(len(made))))
        return made[-1]

    yield make
    for node in made:
        node.machine.clear_faults()
        node.close()
