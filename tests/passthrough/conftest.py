from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fixtures import logs
from tests.fakes.kindnode import KindNode, Site, site

__all__ = ["logs", "site"]


@pytest.fixture
def node(site: Site, memory_path: Path) -> Iterator[KindNode]:
    site.machine.clear_faults()
    site.machine.release_gpu(site.card.gpu_uuid)
    site.reset()
    yield KindNode(site, memory_path / "node")
    site.machine.clear_faults()
    site.machine.release_gpu(site.card.gpu_uuid)
