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
DIFFERENCES = yaml.safe_load(Path(__file__).with_name("smi_differences.yaml").read_text())
WIRED = [
    "dgx-h100", "h100-mig-static", "dgx-1v", "gb10", "gb200-nvl72-tray", "a100-pcie-pairs", "vm-passthrough",
]  # fmt: skip


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
    assert {"discovery", "nvidia-smi"} <= found.checked.keys()


@pytest.mark.parametrize("machine", WIRED)
def test_nothing_differs_when_nvidia_smi_answers_everything(machine: str, tmp_path: Path) -> None:
    found = report(machine, tmp_path)
    assert found.differences == []
    assert found.findings == []
    assert found.checked["NVLink"]


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case["found"])
def test_the_difference_is_found_when_nvidia_smi_says_something_else(
    case: dict[str, str], tmp_path: Path
) -> None:
    found = report(case["machine"], tmp_path, {case["replace"]: case["by"]})
    assert case["found"] in "\n".join(found.differences)


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


def test_the_wrapper_uses_the_given_python_without_setup(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "hack/gpu-check"), "--simulate", "gb10", "--no-setup"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == OK, done.stderr
    assert done.stdout.endswith("gpu-check: nothing differs\n")


def test_the_checklist_names_what_is_there() -> None:
    text = (ROOT / "docs/hardware-checklist.md").read_text()
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)] == list(range(1, 21))
    for place in re.findall(r"examples/[\w-]+", text):
        assert (ROOT / place).is_dir(), place
    known = set(COMMANDS.commands)
    assert set(re.findall(r"(?<!-n )gpu-dra-driver (?!daemonset/)(\w+)", text)) <= known
