from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.fixtures import logs
from tests.fakes.kindnode import KindNode, Site

__all__ = ["logs"]


@pytest.fixture(scope="module")
def site(make_memory_path: Callable[[], Path]) -> Iterator[Site]:
    """A machine for all tests of a file, since rendering one takes longer than a test."""
    one = Site(make_memory_path() / "machine")
    yield one
    one.close()


@pytest.fixture
def node(site: Site, memory_path: Path) -> Iterator[KindNode]:
    site.machine.clear_faults()
    site.machine.release_gpu(site.card.gpu_uuid)
    site.reset()
    yield KindNode(site, memory_path / "node")
    site.machine.clear_faults()
    site.machine.release_gpu(site.card.gpu_uuid)
