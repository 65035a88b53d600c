from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.fixtures import h100, logs
from tests.fakes.machines import SimulatedNode

__all__ = ["h100", "logs"]


@pytest.fixture
def dgx(h100: SimulatedNode) -> SimulatedNode:
    """A DGX H100 that tests share, since rendering one takes longer than reading it: for faults only."""
    h100.machine.clear_faults()
    return h100


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


@pytest.fixture
def opened(machine: Callable[[str], SimulatedNode]) -> Callable[[str], SimulatedNode]:
    """Create simulated machines whose NVML is open."""

    def make(name: str) -> SimulatedNode:
        made = machine(name)
        made.session.reopen()
        return made

    return make


@pytest.fixture
def node(opened: Callable[[str], SimulatedNode]) -> SimulatedNode:
    """A DGX H100 of the test's own, with NVML open."""
    return opened("dgx-h100")
