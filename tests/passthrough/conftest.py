from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_driver.passthrough import steps
from tests.fakes.fixtures import logs
from tests.fakes.kindnode import KindNode, Site, site

__all__ = ["logs", "site"]


@pytest.fixture
def node(site: Site, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KindNode]:
    for name in ("_RELEASE_S", "_NODE_S"):
        monkeypatch.setattr(steps, name, 0.3)
    site.machine.clear_faults()
    site.machine.release_gpu(site.card.gpu_uuid)
    site.reset()
    yield KindNode(site, memory_path / "node")
    site.machine.clear_faults()
    site.machine.release_gpu(site.card.gpu_uuid)
