"""`inspect` prints what the daemon publishes, also of a node with trouble."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.app.settings import DEFAULT_SIMULATOR_DIR
from dra_driver.journal.records import RecordStore
from dra_driver.model.steps import StartMaintenance
from dra_driver.simulator import create_machine
from tests.fakes.samples import record
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.host.trees import VERSION, driver_root, put_elf_libraries
from tests.integration.conftest import Node, poll_all
from tests.integration.test_process import call, environment
from tests.integration.test_withdrawn import register_all

Json = dict[str, Any]


def options(node: Node) -> list[str]:
    return [*node.machine_flags, "--node-name", node.settings.node_name]


def printed(*arguments: str) -> list[Json]:
    done = call("inspect", "-o", "json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return content(json.loads(done.stdout)["items"])


def content(slices: list[Json]) -> list[Json]:
    return sorted(
        ({**entry["spec"], "pool": {**entry["spec"]["pool"], "generation": 0}} for entry in slices),
        key=json.dumps,
    )


def test_the_cause_is_reported_when_the_library_is_made_for_another_architecture(tmp_path: Path) -> None:
    driver_root(tmp_path)
    other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
    put_elf_libraries(tmp_path, "/usr/lib/x86_64-linux-gnu", other)
    done = call("inspect", "--nvidia-driver-root", str(tmp_path), "--container-driver-root", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"because this machine is {os.uname().machine}: for example, /usr/lib/" in done.stderr
    assert f"libnvidia-ml.so.{VERSION} is for {other}" in done.stderr


def test_taints_and_sharing_are_shown_as_published(node: Node, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"health": {"taints": {"row-remap": "NoExecute"}}}))
    names = [device["name"] for device in node.devices()]
    assert printed(*options(node)) == content(node.slices())
    register_all(node)
    node.machine.raise_xid(3, 79)
    node.machine.set_remapped_rows(5, pending=True)
    poll_all(node.driver)
    eventually(lambda: sum(bool(device.get("taints")) for device in node.devices()) == 2)
    eventually(lambda: printed(*options(node)) == content(node.slices()))
    table = call("inspect", *options(node)).stdout.splitlines()
    assert "TAINTS" in table[0]
    assert "xid=79:NoSchedule" in next(line for line in table if line.startswith(names[3]))
    [changed] = [
        device["taints"]
        for entry in printed("--config", str(config), *options(node))
        for device in entry["devices"]
        if device["name"] == names[5]
    ]
    assert {taint["key"]: taint["effect"] for taint in changed}["gpu.nvidia.com/row-remap"] == "NoExecute"
    # As it is without a scheduler that knows taints.
    config.write_text(yaml.safe_dump({"health": {"unhealthyDevices": "withdraw"}}))
    left = [
        device["name"]
        for entry in printed("--config", str(config), *options(node))
        for device in entry["devices"]
    ]
    assert set(names) - set(left) == {names[3], names[5]}
    # A machine that is simulated for this command alone is well.
    assert "TAINTS" not in call("inspect", "--simulate", "dgx-h100").stdout


def test_gpu_in_maintenance_is_left_out_and_named(node: Node) -> None:
    names = [device["name"] for device in node.devices()]
    uuid = node.machine.gpu(2).uuid
    service = replace(record(phase="preparing"), steps=(StartMaintenance((uuid,), "Wait", 900),))
    RecordStore(node.settings.plugin_directory / "claims").save(service)
    done = call("inspect", "-o", "json", *options(node))
    shown = [
        device["name"] for entry in json.loads(done.stdout)["items"] for device in entry["spec"]["devices"]
    ]
    assert set(names) - set(shown) == {names[2]}
    assert f"{uuid}: withdrawn for maintenance claim default/claim-uid-other, waiting" in done.stderr


@pytest.mark.parametrize("command", [["inspect"], ["validate", "examples/one-gpu"]])
def test_simulated_nvml_that_hangs_is_not_taken_for_hardware(command: list[str], memory_path: Path) -> None:
    create_machine("t4-4", memory_path / "machine").set_fault("nvmlDeviceGetCount_v2", delay_s=30.0)
    machine = ["--simulate", "t4-4", "--simulator-dir", str(memory_path / "machine")]
    impatient = "from dra_driver.cli import machine, main; machine.SIMULATED_S = 0.3; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", impatient, *command, *machine],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gpu-dra-driver: NVML has not answered for more than 0.3 s; NVML is simulated: this host is busy, or "
        "`gpu-dra-driver simulate fault` made a call hang\n"
    )


def test_a_machine_without_gpus_is_reported(memory_path: Path) -> None:
    create_machine("gb10", memory_path / "machine").remove_gpu(0)
    done = call("inspect", "--simulate", "gb10", "--simulator-dir", str(memory_path / "machine"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "no device would be published" in done.stderr


def test_equal_gpus_share_rows_and_one_gpu_can_be_named() -> None:
    on_demand = ("inspect", "--simulate", "dgx-h100", "--dynamic-mig")
    lines = call(*on_demand).stdout.splitlines()
    assert len(lines) < 30
    [row] = [line for line in lines if line.startswith("gpu-*-mig-1g10gb-19-{0..6} ")]
    assert "  8 GPUs  " in row
    assert row.endswith("   56 on demand")
    rows = call(*on_demand, "3").stdout.splitlines()
    assert rows[1].startswith("gpu-e92b11af ")
    assert rows[2].startswith("gpu-e92b11af-mig-")
    [drawn] = [line for line in rows if "MIG devices on demand" in line]
    for name in ("gpu-e92b11af", "0000:61:00.0"):
        assert call(*on_demand, name).stdout.splitlines() == rows
        assert call(*on_demand, "--mig", name).stdout.splitlines()[0] == drawn
    done = call(*on_demand, "9")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no GPU 9 on this node" in done.stderr


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["doctor"], ["top", "--once"], ["validate", "examples/one-gpu"], ["device-classes"]],
    ids=" ".join,
)
def test_machine_that_is_simulated_for_one_command_leaves_nothing(
    command: list[str], memory_path: Path
) -> None:
    kept = Path(DEFAULT_SIMULATOR_DIR)
    before = kept.exists()
    done = call(*command, "--simulate", "a30-4", TMPDIR=str(memory_path))
    assert "a30" in done.stdout.lower() or "4 GPUs answer" in done.stdout, done
    assert (list(memory_path.iterdir()), kept.exists()) == ([], before)


@pytest.mark.parametrize(
    "command", [["claims"], ["cleanup"], ["detach", "--end"], ["serviced", "gpu-0"]], ids=" ".join
)
def test_command_for_a_running_plugin_creates_no_machine(command: list[str], memory_path: Path) -> None:
    directory = str(memory_path / "machine")
    done = call(*command, "--simulate", "a30-4", "--simulator-dir", directory)
    assert (done.returncode, done.stdout, list(memory_path.iterdir())) == (1, "", [])
    assert done.stderr.startswith(
        f"gpu-dra-driver: there is no simulated machine in {directory}; create one with"
    )
