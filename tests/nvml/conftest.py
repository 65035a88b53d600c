from collections.abc import Callable

import pytest

from tests.fakes.fixtures import h100, logs, machine
from tests.fakes.machines import SimulatedNode

__all__ = ["h100", "logs", "machine"]


@pytest.fixture
def dgx(h100: SimulatedNode) -> SimulatedNode:
    """A DGX H100 that tests share, since rendering one takes longer than reading it: for faults only."""
    h100.machine.clear_faults()
    return h100


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
