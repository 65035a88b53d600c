"""The step over a simulated machine: real driver root, device nodes and CDI directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.checks import faults
from dra_driver.cdi.spec_step import CdiSteps
from dra_driver.claims.rules.plan import plan_claim
from dra_driver.errors import RetryableError
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.model.inventory import Inventory
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteCdiSpec
from dra_driver.mps.layout import mps_layout
from dra_driver.simulator import device_node_reader
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import DRIVER, NODE, claim

STEP = WriteCdiSpec()


class NothingMade:
    """No MIG device was made on demand."""

    def created_instance(self, device: str) -> None:
        return None

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> None:
        return None


class Bench:
    def __init__(self, directory: Path, name: str) -> None:
        self.node = SimulatedNode(name, directory / "machine")
        self.inventory: Inventory = self.node.discover()
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        reader = device_node_reader(self.node.machine)
        self.steps = CdiSteps(
            DRIVER,
            self.specs,
            DriverRoot(self.node.paths, nodes=reader),
            GpuNodes(self.node.paths, nodes=reader),
            lambda: self.inventory.versions.driver,
            mps_layout(directory / "plugin").directories,
            instances=NothingMade(),
        )

    def plan(self, *names: str) -> Plan:
        return plan_claim(claim(*names), self.inventory, NODE, DRIVER, ())

    def record(self, plan: Plan) -> ClaimRecord:
        return ClaimRecord(plan.claim, "prepared", "boot", plan.held_devices(), plan.steps)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, "h100-mig-static")
    yield made
    made.node.close()


def test_spec_holds_the_nodes_of_exactly_the_devices(bench: Bench) -> None:
    names = list(bench.inventory.by_name)
    part, whole = names[0], names[-1]
    plan = bench.plan(part, whole)
    bench.steps.do(STEP, plan)
    spec = bench.specs.read("uid-1")
    assert spec is not None
    assert faults(spec) == []
    nodes = {
        device["name"]: sorted(
            node["path"] for node in device["containerEdits"]["deviceNodes"] if "dri" not in node["path"]
        )
        for device in spec["devices"]
    }
    minors = [bench.inventory.by_name[name].gpu.minor for name in (part, whole)]
    assert list(nodes) == [f"uid-1-{part}", f"uid-1-{whole}"]
    assert nodes[f"uid-1-{whole}"] == [f"/dev/nvidia{minors[1]}"]
    caps = [path for path in nodes[f"uid-1-{part}"] if path.startswith("/dev/nvidia-caps/")]
    assert (len(caps), set(nodes[f"uid-1-{part}"]) - set(caps)) == (2, {f"/dev/nvidia{minors[0]}"})


def test_every_device_of_the_machine_has_a_spec_that_runtimes_take(bench: Bench) -> None:
    for name in bench.inventory.by_name:
        assert faults(bench.steps.spec(bench.plan(name))) == []


def test_step_twice_is_as_once_and_undo_is_the_start(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(next(iter(bench.inventory.by_name)))
    record = bench.record(plan)
    assert not bench.steps.in_place(STEP, record)
    bench.steps.do(STEP, plan)
    file = bench.specs.file("uid-1")
    before = file.stat()
    bench.steps.do(STEP, plan)
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert bench.steps.in_place(STEP, record)
    bench.steps.undo(STEP, record)
    bench.steps.undo(STEP, record)
    assert list((tmp_path / "cdi").iterdir()) == []


def test_spec_follows_a_driver_that_was_replaced(bench: Bench) -> None:
    plan = bench.plan(list(bench.inventory.by_name)[-1])
    bench.steps.do(STEP, plan)
    old = bench.specs.file("uid-1").read_text()
    bench.node.machine.load_driver("590.1.2")
    bench.inventory = bench.node.discover()
    bench.steps.do(STEP, bench.plan(plan.devices[0].offered.name))
    new = bench.specs.file("uid-1").read_text()
    assert "580.95.05" in old
    assert "580.95.05" not in new
    assert "590.1.2" in new


def test_step_fails_for_now_when_the_driver_is_gone(bench: Bench) -> None:
    plan = bench.plan(next(iter(bench.inventory.by_name)))
    bench.node.machine.unload_driver()
    with pytest.raises(RetryableError):
        bench.steps.do(STEP, plan)
    assert bench.specs.read("uid-1") is None


def test_spec_that_no_record_speaks_of_is_forgotten(bench: Bench) -> None:
    bench.steps.do(STEP, bench.plan(next(iter(bench.inventory.by_name))))
    bench.steps.forget("uid-1")
    assert bench.specs.read("uid-1") is None


def test_what_the_host_lacks_is_told_once_until_it_changes(bench: Bench) -> None:
    plan = bench.plan(next(iter(bench.inventory.by_name)))
    hook = bench.node.machine.host_root / "usr/bin/nvidia-cdi-hook"
    with structlog.testing.capture_logs() as logs:
        bench.steps.do(STEP, plan)
        bench.steps.do(STEP, plan)
        assert [entry["event"] for entry in logs] == ["driver_files_incomplete"]
        assert logs[0]["log_level"] == "warning"
        assert "nvidia-cdi-hook was not found" in logs[0]["notes"][0]
        hook.write_text("#!/bin/sh\nexit 0\n")
        hook.chmod(0o755)
        bench.steps.do(STEP, plan)
        assert len(logs) == 1
        hook.unlink()
        bench.steps.do(STEP, plan)
        assert len(logs) == 2
