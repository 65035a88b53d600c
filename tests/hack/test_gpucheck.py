"""The tool as a whole, on simulated machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpucheck.cli import CANNOT_RUN, DIFFERENT, OK, main
from gpucheck.view import Options, real_machine, simulated_machine

from dra_driver.app import platforms
from dra_driver.cli.commands import ROOT as COMMANDS
from dra_driver.settings import Settings
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


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def findings(document: dict, level: str = "difference") -> list[str]:
    return [
        f"{section['title']}: {item['subject']}: {item['text']}"
        for section in document["sections"]
        for item in section["findings"]
        if item["level"] == level
    ]


@pytest.mark.parametrize("machine", machine_names())
def test_nothing_differs_when_the_machine_is_whole(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = report(capsys, "--simulate", machine)
    assert findings(document) == []
    assert code == OK
    assert document["verdict"] == "ok"
    checked = {section["title"]: section["checked"] for section in document["sections"]}
    assert all(checked[title] for title in ("discovery", "/proc", "nvidia-smi"))
    assert checked["CDI spec"] or not document["devices"]


@pytest.mark.parametrize("machine", WIRED)
def test_nothing_differs_when_nvidia_smi_answers_everything(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with looking_at(machine, tmp_path) as view:
        smi = full_smi(tmp_path / "nvidia-smi", view)
        gpus = len(view.inventory.gpus)
    code, document = report(capsys, "--simulate", machine, "--nvidia-smi", smi)
    assert findings(document) == []
    assert code == OK
    sections = {section["title"]: section for section in document["sections"]}
    assert sections["nvidia-smi"]["notChecked"] == sections["NVLink"]["notChecked"] == []
    assert sections["NVLink"]["checked"] >= 2 * gpus


@pytest.mark.parametrize(
    ("machine", "old", "new", "found"),
    [
        ("dgx-h100", ", 81559, ", ", 81558, ", "memory.total: 81559 here, 81558 in nvidia-smi"),
        ("dgx-h100", ", 9.0, ", ", 9.1, ", "compute_cap: 9.0 here, 9.1 in nvidia-smi"),
        ("dgx-h100", "<minor_number>3", "<minor_number>9", "minor: 3 here, 9 in nvidia-smi -q"),
        ("dgx-h100", "NV18\t0-7", "SYS\t0-7", "but topo -m shows no NVLink"),
        (
            "dgx-h100",
            "\t Link 17: 26.562",
            "\t Link 17: <inactive>",
            "active NVLinks: 18 here, 17 in nvlink -s",
        ),
        ("dgx-h100", "GPU 7: NVIDIA", "gone", "number of GPUs: 8 here, 7 in nvidia-smi"),
        ("dgx-h100", ", 580.95.05, ", ", 580.95.06, ", "driver_version: 580.95.05 here, 580.95.06"),
        ("h100-mig-static", "1g.20gb     Device", "2g.20gb     Device", "(2g.20gb) is only in nvidia-smi -L"),
        (
            "h100-mig-static",
            "4:2 |",
            "2:2 |",
            "GPU instance 5 (profile, start, size): (14, 4, 2) here, (14, 2, 2)",
        ),
        ("h100-mig-static", ", Enabled, ", ", Disabled, ", "mig.mode.current: Enabled here, Disabled"),
        ("gb200-nvl72-tray", "<cliqueId>32766", "<cliqueId>1", "fabric: ('7f3c1ad2"),
        ("dgx-1v", "NV1\t", "SYS\t", "nvlinkDomain: nvlink-33f8fb5b here, "),
        ("dgx-1v", "0000:8A:00.0", "0000:8B:00.0", "pci.bus_id: 0000:8a:00.0 here, 0000:8b:00.0"),
    ],
)
def test_the_difference_is_found_when_nvidia_smi_says_something_else(
    machine: str, old: str, new: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with looking_at(machine, tmp_path) as view:
        smi = full_smi(tmp_path / "nvidia-smi", view, {old: new})
    code, document = report(capsys, "--simulate", machine, "--nvidia-smi", smi)
    assert code == DIFFERENT
    assert found in "\n".join(findings(document))


def test_the_text_ends_with_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--simulate", "gb10"]) == OK
    text = capsys.readouterr().out
    assert "gpu-a2eae7ef   0       gpu    NVIDIA GB10" in text
    assert text.endswith("\ngpu-check: OK\n")
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
    code, document = report(capsys, *arguments)
    assert code == CANNOT_RUN
    assert document["verdict"] == "cannot run"


def test_it_cannot_run_when_the_machine_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate", "nothing-like-this"]) == CANNOT_RUN
    assert "there is no simulated machine" in capsys.readouterr().err


def test_it_looks_where_the_daemon_looks(tmp_path: Path) -> None:
    inside = tmp_path / "driver-root"
    inside.mkdir()
    for root in ("/", "/run/nvidia/driver"):
        for container_root in (str(inside), str(tmp_path / "none")):
            settings = Settings("node", nvidia_driver_root=root, container_driver_root=container_root)
            options = Options(nvidia_driver_root=root, container_driver_root=container_root)
            assert real_machine(options).paths == platforms.real_platform(settings).paths
    daemon = platforms.simulated_platform("gb10", tmp_path / "machine")
    assert simulated_machine("gb10", tmp_path / "machine").paths == daemon.paths


def test_the_program_runs_when_it_has_the_runtime_packages_alone() -> None:
    """Neither the packages of the daemon's servers and clients nor those of its command line are needed."""
    code = (
        "import sys; from gpucheck.cli import main; main(['--simulate', 'gb10']); "
        "print(sorted({'grpc', 'google.protobuf', 'kubernetes', 'prometheus_client'} "
        "& set(sys.modules)), file=sys.stderr)"
    )
    path = os.pathsep.join([str(ROOT / "hack"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stderr.splitlines()[-1] == "[]"


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
    assert done.stdout.endswith("gpu-check: OK\n")
    assert main(["--simulate", str(recording)]) == OK


def test_the_checklist_is_printed_and_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checklist"]) == OK
    text = capsys.readouterr().out
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)] == list(range(1, 20))
    for place in re.findall(r"examples/[\w-]+|components/[\w-]+", text):
        folder = ROOT / (place if place.startswith("examples") else f"daemonset/{place}")
        assert folder.is_dir(), place
    known = set(COMMANDS.commands)
    assert set(re.findall(r"(?<!-n )gpu-dra-driver (\w+)", text)) <= known
