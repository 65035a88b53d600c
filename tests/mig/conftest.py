from pathlib import Path

import pytest

from tests.fakes.fixtures import h100, logs, node

__all__ = ["h100", "logs", "node"]


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """In memory: what a loss of power leaves is told by `tests.fakes.powerloss`, not by this machine's disk."""
    return memory_path
