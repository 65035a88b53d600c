"""The step over a simulated machine: real driver root, device nodes and CDI directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from dra_driver.api.config import GROUP_VERSION
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.errors import RetryableError
from dra_driver.model.claim import AllocatedClaim, DeviceConfig
from dra_driver.model.inventory import Inventory, OfferedDevice, StaticMigDevice, WholeGpu
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import StartMaintenance, WriteCdiSpec
from dra_driver.simulator import SimulatedDeviceNodes
from tests.cdi.cdi_samples import steps_over
from tests.cdi.cdi_schema import faults
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import DRIVER, claim, plan, result

STEP = WriteCdiSpec()


class Bench:
    def __init__(self, directory: Path, name: str) -> None:
        self.node = SimulatedNode(name, directory / "machine")
        self.inventory: Inventory = self.node.discover()
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        self.steps = steps_over(
            directory,
            self.specs,
            self.node.paths,
            SimulatedDeviceNodes(self.node.machine.host_root),
            driver_version=lambda: self.inventory.versions.driver,
        )

    def plan(self, *names: str) -> Plan:
        return plan(claim(*names), found=self.inventory)

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
    bench.steps.undo(STEP, record.ref)
    bench.steps.undo(STEP, record.ref)
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


def test_missing_host_files_are_reported_once_until_they_change(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.host.driver_root._FRESH_S", 0.0)
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


MANAGEMENT = DeviceConfig(
    "FromClaim", (), DRIVER, {"apiVersion": GROUP_VERSION, "kind": "GpuConfig", "management": True}
)
CAPS = "proc/driver/nvidia/capabilities"


def named(bench: Bench, kind: type[OfferedDevice]) -> list[str]:
    return [name for name, device in bench.inventory.by_name.items() if isinstance(device, kind)]


def watching(*names: str, requests: tuple[str, ...] = ("gpus",), **changes: Any) -> AllocatedClaim:
    """A claim with admin access to the devices in each of the requests."""
    looks = [result(name, request, admin_access=True) for request in requests for name in names]
    return claim(*looks, **{"configs": (MANAGEMENT,), **changes})


def nodes_of(bench: Bench, wanted: AllocatedClaim) -> list[set[str]]:
    """The nodes of each device of the claim's spec, in the order of its results. Runtimes take the spec."""
    order = list(dict.fromkeys(f"{wanted.ref.uid}-{one.device}" for one in wanted.results))
    spec = bench.steps.spec(plan(wanted, found=bench.inventory))
    assert faults(spec) == []
    devices = sorted(spec["devices"], key=lambda one: order.index(one["name"]))
    return [{node["path"] for node in one["containerEdits"]["deviceNodes"]} for one in devices]


def of_caps(nodes: set[str]) -> set[str]:
    return {path for path in nodes if path.startswith("/dev/nvidia-caps/")}


def test_management_gives_all_gpus_and_capabilities_of_the_node_once(bench: Bench) -> None:
    """Also GPUs in MIG mode, which no claim can have whole; the other devices have only their own."""
    wholes = named(bench, WholeGpu)
    assert 1 < len(wholes) < len(bench.inventory.gpus)
    first, *others = nodes_of(bench, watching(*wholes))
    minors = {f"/dev/nvidia{gpu.minor}" for gpu in bench.inventory.gpus}
    assert minors <= first
    instances = list((bench.node.machine.host_root / CAPS).rglob("access"))
    assert {"/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"} < of_caps(first)
    assert len(of_caps(first)) == 2 + len(instances) > 10
    for nodes in others:
        assert len(nodes & minors) == 1
        assert not of_caps(nodes)


def test_maintenance_names_the_gpus_of_the_claim_to_its_containers(bench: Bench) -> None:
    made = plan(watching(*named(bench, WholeGpu), configs=()), found=bench.inventory)
    spec = bench.steps.spec(replace(made, steps=(StartMaintenance(("GPU-1", "GPU-2"), "Wait", 900), STEP)))
    assert len(spec["devices"]) > 1
    for device in spec["devices"]:
        assert device["containerEdits"]["env"] == ["MAINTENANCE_GPUS=GPU-1,GPU-2", "DRA_ADMIN_ACCESS=true"]


def test_every_request_that_manages_has_the_nodes(bench: Bench) -> None:
    """A container may have one request only. Requests have the devices in orders of their own."""
    one, other, *_ = named(bench, WholeGpu)
    looks = [
        result(*pair, admin_access=True) for pair in ((one, "a"), (other, "a"), (other, "b"), (one, "b"))
    ]
    found = nodes_of(bench, claim(*looks, configs=(MANAGEMENT,)))
    assert [len(of_caps(nodes)) > 2 for nodes in found] == [True, True]
    only_a = replace(MANAGEMENT, requests=("a",))
    found = nodes_of(bench, claim(*looks[:2], replace(looks[2], device=other), configs=(only_a,)))
    assert [bool(of_caps(nodes)) for nodes in found] == [True, False]


def test_nodes_of_management_keep_away_from_devices_that_other_requests_use(bench: Bench) -> None:
    one, other, *_ = named(bench, WholeGpu)
    only_a = replace(MANAGEMENT, requests=("a",))
    looks = [result(name, "a", admin_access=True) for name in (one, other)]
    found = nodes_of(bench, claim(*looks, result(one, "b"), configs=(only_a,)))
    assert [bool(of_caps(nodes)) for nodes in found] == [False, True]


def test_management_by_a_mig_device(bench: Bench) -> None:
    part, *_ = named(bench, StaticMigDevice)
    parameters = MANAGEMENT.parameters | {"kind": "MigDeviceConfig"}
    (nodes,) = nodes_of(bench, watching(part, configs=(replace(MANAGEMENT, parameters=parameters),)))
    assert {f"/dev/nvidia{gpu.minor}" for gpu in bench.inventory.gpus} <= nodes
    assert "/dev/nvidia-caps/nvidia-cap1" in nodes


@pytest.mark.parametrize(
    "configs", [(), (replace(MANAGEMENT, parameters=MANAGEMENT.parameters | {"management": False}),)]
)
def test_admin_access_alone_gives_no_capabilities(bench: Bench, configs: tuple[DeviceConfig, ...]) -> None:
    whole = list(bench.inventory.by_name)[-1]
    (nodes,) = nodes_of(bench, watching(whole, configs=configs))
    assert not of_caps(nodes)
    assert {path for path in nodes if "dri" not in path} == {
        f"/dev/nvidia{bench.inventory.by_name[whole].gpu.minor}"
    }


def test_management_goes_without_what_the_host_lacks_and_says_so(bench: Bench) -> None:
    root = bench.node.machine.host_root
    whole = list(bench.inventory.by_name)[-1]
    other = next(gpu for gpu in bench.inventory.gpus if gpu != bench.inventory.by_name[whole].gpu)
    (root / f"dev/nvidia{other.minor}").unlink()
    shutil.rmtree(root / CAPS)
    with structlog.testing.capture_logs() as logs:
        (nodes,) = nodes_of(bench, watching(whole))
    (reported,) = [entry for entry in logs if entry["event"] == "management_incomplete"]
    assert reported["log_level"] == "warning"
    assert reported["missing"] == [
        f"/dev/nvidia{other.minor}",
        "the MIG capabilities of the NVIDIA driver (/proc/driver/nvidia/capabilities/mig)",
    ]
    assert not of_caps(nodes)
    assert f"/dev/nvidia{bench.inventory.by_name[whole].gpu.minor}" in nodes
    assert f"/dev/nvidia{other.minor}" not in nodes


def test_management_of_gpus_without_mig_misses_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "t4-4")
    shutil.rmtree(bench.node.machine.host_root / CAPS)
    with structlog.testing.capture_logs() as logs:
        first, *_ = nodes_of(bench, watching(*bench.inventory.by_name))
    assert "management_incomplete" not in [entry["event"] for entry in logs]
    assert {path for path in first if "dri" not in path} == {
        f"/dev/nvidia{gpu.minor}" for gpu in bench.inventory.gpus
    }
    bench.node.close()


def test_management_of_a_driver_that_is_being_loaded_is_retried(bench: Bench) -> None:
    """It has capabilities, but no major number for them yet."""
    (bench.node.machine.host_root / "proc/devices").write_text("Character devices:\n195 nvidia\n")
    with pytest.raises(RetryableError, match="the kernel lists no nvidia-caps devices"):
        nodes_of(bench, watching(list(bench.inventory.by_name)[-1]))
