"""The pool of GPUs with MIG on demand; `make golden` rewrites it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from playground.apiserver.rules import slice_faults

from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import Pool, build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.fakes.machines import SimulatedNode, read_inventory
from tests.fakes.samples import DRIVER, NODE
from tests.slices.test_attributes import check_form

GOLDEN = Path(__file__).parents[1] / "golden" / "mig-on-demand"
MODE_NEEDS_A_RESET = {"a30-4", "dgx-a100-80gb"}

CASES: dict[str, tuple[str, str | None]] = {
    "a30": ("a30-4", None),
    "dgx-a100-80gb": ("dgx-a100-80gb", None),
    "hgx-h100": ("hgx-h100-4", None),
    "hgx-h100-beside-3g": ("hgx-h100-4", "3g.40gb"),
    "dgx-b200": ("dgx-b200", None),
    "rtx-pro-6000": ("rtx-pro-6000-8", None),
}
"""The machine of each golden file, and the profile of the instance that a person has created on it."""


@pytest.fixture
def inventory_of(tmp_path: Path) -> Iterator[Any]:
    nodes: list[SimulatedNode] = []

    def make(name: str) -> Inventory:
        machine, made = CASES[name]
        node = SimulatedNode(machine, tmp_path / name)
        nodes.append(node)
        if machine in MODE_NEEDS_A_RESET or made:
            node.machine.set_mig_mode(0, True)
        if made:
            node.machine.create_mig(0, made, 4)
        node.session.reopen()
        found = read_inventory(on_demand=lambda gpu: True)
        return replace(found, gpus=tuple(map(beside_what_exists, found.gpus)))

    with structlog.testing.capture_logs():
        yield make
    for node in nodes:
        node.close()


def beside_what_exists(gpu: Gpu) -> Gpu:
    raw = gpu.partitioning
    if raw is None:
        return gpu
    return replace(gpu, partitioning=partitioned(raw, raw.withheld, offers_whole=raw.offers_whole))


def one_line(value: Any) -> str:
    return yaml.dump(value, default_flow_style=True, sort_keys=False, width=100_000).strip()


def amounts(entries: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: entry["value"] for name, entry in entries.items()}


def rendered(pool: Pool) -> str:
    """A device a line, with what all have in common said once; files of hundreds of kilobytes are not read."""
    (counters,) = (entry for content in pool.slices for entry in content.shared_counters)
    devices = [device for content in pool.slices for device in content.devices]
    common = {
        name: value
        for name, value in devices[0]["attributes"].items()
        if all(device["attributes"].get(name) == value for device in devices)
    }
    return "\n".join(
        [
            f"counters of {counters['name']}: {one_line(amounts(counters['counters']))}",
            "every device:",
            *(f"  {name}: {one_line(value)}" for name, value in common.items()),
            *(line for device in devices for line in described(device, common)),
            "",
        ]
    )


def described(device: dict[str, Any], common: dict[str, Any]) -> Sequence[str]:
    own = {name: value for name, value in device["attributes"].items() if name not in common}
    (use,) = device["consumesCounters"]
    return (
        f"{device['name']}:",
        f"  attributes: {one_line(own)}",
        f"  capacity: {one_line(amounts(device['capacity']))}",
        f"  consumes: {one_line(amounts(use['counters']))}",
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_pool_of_one_gpu_is_the_golden_one(name: str, inventory_of, is_golden) -> None:
    found = inventory_of(name)
    pool = build_pool(replace(found, gpus=found.gpus[:1]), NODE)
    assert pool.faults == ()
    is_golden(GOLDEN / f"{name}.yaml", rendered(pool))
    for content in pool.slices:
        for device in content.devices:
            check_form(device)
            assert set(device) == {"name", "attributes", "capacity", "consumesCounters"}


def test_there_is_no_golden_file_without_a_machine() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == sorted(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_api_server_takes_the_pool_of_the_whole_machine(name: str, inventory_of) -> None:
    found = inventory_of(name)
    pool = build_pool(found, NODE)
    assert pool.faults == ()
    for entry in slice_changes(pool, (), Owner(DRIVER, NODE, "uid")).creates:
        assert slice_faults(entry, None) == []
    assert len([device for content in pool.slices for device in content.devices]) == len(found.by_name)
