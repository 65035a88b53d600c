"""The pool of every simulated machine, read through the real binding; `make golden` rewrites it."""

import random
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from dra_driver.nvml import scan as discovery
from dra_driver.simulator import machine_names
from dra_driver.slices.rules.build import Pool, build_pool
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import NODE
from tests.slices.test_attributes import check_form

GOLDEN = Path(__file__).parents[1] / "golden"


class _Dumper(yaml.SafeDumper):
    """One attribute a line, no anchors: golden files are read by people in reviews."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def rendered(pool: Pool) -> str:
    document = {
        "pool": pool.name,
        "slices": [
            {
                **({"sharedCounters": list(content.shared_counters)} if content.shared_counters else {}),
                "devices": list(content.devices),
            }
            for content in pool.slices
        ],
    }
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=200)


@pytest.fixture
def pool_of(tmp_path: Path):
    nodes = []

    def make(machine: str) -> Pool:
        nodes.append(SimulatedNode(machine, tmp_path / machine))
        with structlog.testing.capture_logs():
            found = nodes[-1].discover()
        assert found.faults == ()
        return build_pool(found, NODE)

    yield make
    for node in nodes:
        node.close()


@pytest.mark.parametrize("machine", machine_names())
def test_pool_of_the_machine_is_the_golden_one(machine: str, pool_of, is_golden) -> None:
    pool = pool_of(machine)
    assert pool.faults == ()
    for content in pool.slices:
        for device in content.devices:
            check_form(device)
    is_golden(GOLDEN / f"{machine}.yaml", rendered(pool))


def test_there_is_no_golden_file_without_a_machine() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == machine_names()


@pytest.mark.parametrize("machine", ["dgx-1v", "h100-mig-static"])
def test_pool_has_the_same_bytes_when_nvml_counts_in_another_order(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = SimulatedNode(machine, tmp_path)
    read = discovery.read_gpu
    try:
        expected = rendered(build_pool(node.read(), NODE))
        for seed in range(5):
            order = list(range(8))
            random.Random(seed).shuffle(order)
            monkeypatch.setattr(discovery, "read_gpu", lambda index, order=order: read(order[index]))
            assert rendered(build_pool(node.read(), NODE)) == expected
    finally:
        node.close()
