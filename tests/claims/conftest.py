from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.fixtures import h100, logs, node
from tests.fakes.kindnode import Site

__all__ = ["h100", "logs", "node"]


@pytest.fixture(scope="module")
def site(make_memory_path: Callable[[], Path]) -> Iterator[Site]:
    """A machine for all tests of a file, since rendering one takes longer than a test."""
    one = Site(make_memory_path() / "machine")
    yield one
    one.close()
