from pathlib import Path

import pytest
import structlog

from tests.core.samples import MIXED
from tests.fakes.preparing import Node


@pytest.fixture(autouse=True)
def logs():
    """Log lines are kept, not printed."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, MIXED)
