"""The tool as a whole, on simulated machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gpucheck.__main__ import CANNOT_RUN, DIFFERENT, OK, check, main
from gpucheck.machine import Report

from dra_driver.cli.commands import ROOT as COMMANDS
from dra_driver.simulator import machine_names
from tests.hack.support import full_smi, looking_at

ROOT = Path(__file__).parents[2]
WIRED = [
    "dgx-h100",
    "h100-mig-static",
    "dgx-1v",
    "gb10",
    "gb200-nvl72-tray",
    "a100-pcie-pairs",
    "vm-passthrough",
]


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated nvidia-smi shows no MIG device without its nodes; a real one makes the nodes itself."""
    monkeypatch.delenv("SIMULATE_HOSTILE")


def report(machine: str, directory: Path, replace: dict[str, str] | None = None) -> Report:
    """What is found beside an nvidia-smi that answers everything, in some of it with other words."""
    with looking_at(machine, directory) as view:
        return check(view, full_smi(directory / "nvidia-smi", view, replace))


@pytest.mark.parametrize("machine", machine_names())
def test_nothing_differs_when_the_machine_is_whole(machine: str, tmp_path: Path) -> None:
    with looking_at(machine, tmp_path) as view:
        found = check(view)
    assert found.differences == []
    assert {"discovery", "/proc", "nvidia-smi"} <= found.checked.keys()


@pytest.mark.parametrize("machine", WIRED)
def test_nothing_differs_when_nvidia_smi_answers_everything(machine: str, tmp_path: Path) -> None:
    found = report(machine, tmp_path)
    assert found.differences == []
    assert {topic for level, topic, _ in found.findings if level == "not checked"} == {"nvidia-ctk"}
    assert found.checked["NVLink"]


@pytest.mark.parametrize(
    ("machine", "old", "new", "found"),
    [
        ("dgx-h100", ", 81559, ", ", 81558, ", "memory.total: 81559 here, 81558 there"),
        ("dgx-h100", ", 9.0\n", ", 9.1\n", "compute_cap: 9.0 here, 9.1 there"),
        ("dgx-h100", "<minor_number>3", "<minor_number>9", "minor: 3 here, 9 there"),
        ("dgx-h100", "NV18\t0-7", "SYS\t0-7", "but topo -m shows no NVLink"),
        (
            "dgx-h100",
            "\t Link 17: 26.562",
            "\t Link 17: <inactive>",
            "active NVLinks: 18 here, 17 there",
        ),
        ("dgx-h100", "GPU 7: NVIDIA", "gone", "is only ours"),
        ("dgx-h100", ", 580.95.05, ", ", 580.95.06, ", "driver_version: 580.95.05 here, 580.95.06"),
        ("h100-mig-static", "1g.20gb     Device", "2g.20gb     Device", "'2g.20gb')"),
        (
            "h100-mig-static",
            "4:2 |",
            "2:2 |",
            "GPU instance 5 (profile, start, size): (14, 4, 2) here, (14, 2, 2)",
        ),
        ("h100-mig-static", ", Enabled, ", ", Disabled, ", "mig.mode.current: Enabled here, Disabled"),
        ("gb200-nvl72-tray", "<cliqueId>32766", "<cliqueId>1", "fabric: 7f3c1ad2"),
        ("dgx-1v", "NV1\t", "SYS\t", "nvlinkDomain: nvlink-33f8fb5b here, "),
        ("dgx-1v", "0000:8A:00.0", "0000:8B:00.0", "pci.bus_id: 0000:8a:00.0 here, 0000:8b:00.0"),
    ],
)
def test_the_difference_is_found_when_nvidia_smi_says_something_else(
    machine: str, old: str, new: str, found: str, tmp_path: Path
) -> None:
    assert found in "\n".join(report(machine, tmp_path, {old: new}).differences)


def test_the_text_ends_with_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--simulate", "gb10"]) == OK
    text = capsys.readouterr().out
    assert "gpu-a2eae7ef   0       gpu    NVIDIA GB10" in text
    assert text.endswith("\ngpu-check: nothing differs\n")
    with looking_at("gb10", tmp_path) as view:
        smi = full_smi(tmp_path / "nvidia-smi", view, {"NVIDIA GB10": "NVIDIA GB20"})
    assert main(["--simulate", "gb10", "--nvidia-smi", smi]) == DIFFERENT
    assert capsys.readouterr().out.endswith("\ngpu-check: 1 difference\n")


def test_it_cannot_run_when_there_is_no_nvml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nvidia-driver-root", str(tmp_path), "--container-driver-root", str(tmp_path / "none")]
    assert main(arguments) == CANNOT_RUN
    error = capsys.readouterr().err
    assert error.startswith("gpu-check: cannot run: libnvidia-ml.so.1 is not below the driver root")
    assert error.count("\n") == 1


def test_it_cannot_run_when_the_machine_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate", "nothing-like-this"]) == CANNOT_RUN
    assert "there is no simulated machine" in capsys.readouterr().err


def test_a_recording_has_what_everybody_said(tmp_path: Path) -> None:
    with looking_at("h100-mig-static", tmp_path) as view:
        found = check(view, full_smi(tmp_path / "nvidia-smi", view), record=tmp_path / "recording.yaml")
        devices = [device.uuid for device in view.inventory.devices()]
    recording = yaml.safe_load((tmp_path / "recording.yaml").read_text())
    assert recording["report"] == found.lines()
    assert [device["attributes"]["uuid"]["string"] for device in recording["devices"]] == devices
    assert recording["nvml"]["return codes"]["nvmlDeviceGetUUID"] == [0]
    assert set(recording["nvidia-smi"]) >= {"nvidia-smi -L", "nvidia-smi -q -x", "nvidia-smi mig -lgi"}
    assert devices[0] in recording["nvidia-smi"]["nvidia-smi -L"]
    assert recording["CDI spec"]["devices"]


def test_the_wrapper_uses_the_given_python_without_setup(tmp_path: Path) -> None:
    recording = tmp_path / "recording.yaml"
    done = subprocess.run(
        [str(ROOT / "hack/gpu-check"), "--simulate", "gb10", "--no-setup", "--record", str(recording)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == OK, done.stderr
    assert done.stdout.endswith("gpu-check: nothing differs\n")
    assert recording.exists()


def test_the_checklist_is_printed_and_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checklist"]) == OK
    text = capsys.readouterr().out
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)] == list(range(1, 20))
    for place in re.findall(r"examples/[\w-]+|components/[\w-]+", text):
        folder = ROOT / (place if place.startswith("examples") else f"daemonset/{place}")
        assert folder.is_dir(), place
    known = set(COMMANDS.commands)
    assert set(re.findall(r"(?<!-n )gpu-dra-driver (\w+)", text)) <= known
