from pathlib import Path

import pytest

from dra_driver.model.inventory import DynamicMigDevice
from tests.fakes.fixtures import h100, logs, machine
from tests.fakes.machines import SimulatedNode
from tests.fakes.mignode import MigNode, make_idle

__all__ = ["h100", "logs", "machine"]


@pytest.fixture
def node(h100: SimulatedNode, tmp_path: Path) -> MigNode:
    make_idle(h100, mig_mode=False)
    return MigNode(h100, tmp_path)


@pytest.fixture
def small(node: MigNode) -> DynamicMigDevice:
    return node.wanted("1g.10gb", 3)
