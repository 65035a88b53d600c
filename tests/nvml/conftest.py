from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from tests.fakes.machines import SimulatedNode


@pytest.fixture(autouse=True)
def logs():
    """Log lines are kept, not printed."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture(scope="module")
def _dgx(make_memory_path: Callable[[], Path]) -> Iterator[SimulatedNode]:
    made = SimulatedNode("dgx-h100", make_memory_path())
    yield made
    made.close()


@pytest.fixture
def dgx(_dgx: SimulatedNode) -> SimulatedNode:
    """A DGX H100 that tests share, since rendering one takes longer than reading it: for faults only."""
    _dgx.machine.clear_faults()
    return _dgx


@pytest.fixture
def machine(memory_path: Path) -> Iterator[Callable[[str], SimulatedNode]]:
    """Makes simulated machines; the binding is put back in the end."""
    made: list[SimulatedNode] = []

    def make(name: str) -> SimulatedNode:
        made.append(SimulatedNode(name, memory_path / str(len(made))))
        return made[-1]

    yield make
    for node in made:
        node.close()
