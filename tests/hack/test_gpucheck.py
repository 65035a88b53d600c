"""hack/gpu-check on simulated machines, compared with an nvidia-smi that answers everything."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import pynvml
import pytest
from gpucheck import (
    CANNOT_RUN,
    DIFFERENT,
    NO_PERMISSION,
    OK,
    READS,
    ReadOnlyLibrary,
    Report,
    View,
    ask_smi,
    check,
    main,
    opened,
)

from dra_driver.app.settings import Settings
from dra_driver.cli.commands import ROOT as COMMANDS
from dra_driver.model.gpu import Gpu
from dra_driver.nvml import session
from dra_driver.simulator import machine_names, open_machine
from dra_driver.simulator.machine_state import nvlink_count
from tests.fakes.tables import read_yaml, tabled

ROOT = Path(__file__).parents[2]
DIFFERENCES = read_yaml(Path(__file__).with_name("smi_differences.yaml"))
WIRED = [
    "dgx-h100", "h100-mig-static", "dgx-1v", "gb10", "gb200-nvl72-tray", "a100-pcie-pairs", "vm-passthrough",
]  # fmt: skip
_CHANGES = re.compile(
    r"Set(?!s|tings|\Z)|Create|Destroy|Clear|Reset|Remove|Modify|Register|Freeze|Force|Update|Write|Activate|Alloc|Free|Discover"
)


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated nvidia-smi lists no MIG device without its nodes; the real one creates the nodes itself."""
    monkeypatch.delenv("SIMULATE_HOSTILE")


@contextmanager
def looking_at(name: str, directory: Path) -> Iterator[View]:
    """The simulated machine, kept in `directory`/machine."""
    with opened(Settings("gpu-check", simulate=name, simulator_dir=str(directory / "machine"))) as view:
        yield view


def full_smi(path: Path, view: View, replace: dict[str, str] | None = None) -> str:
    """An nvidia-smi with the forms of a real one. `replace` changes texts in all its answers."""
    gpus = view.inventory.gpus
    version = f"<driver_version>{view.inventory.versions.driver}</driver_version>"
    cases = {
        "-L": "".join(map(_listed, gpus)),
        "'-q -x'": f"<nvidia_smi_log>{version}{''.join(map(_xml, gpus))}</nvidia_smi_log>\n",
        "'topo -m'": _topology(view),
    }
    lines = ["#!/bin/sh", 'case "$*" in']
    for number, (arguments, text) in enumerate(cases.items()):
        for old, new in (replace or {}).items():
            text = text.replace(old, new)  # noqa: PLW2901
        answer = path.with_name(f"{path.name}.{number}")
        answer.write_text(text)
        lines.append(f"  {arguments}) cat '{answer}' ;;")
    path.write_text("\n".join([*lines, '  *) echo "unknown: $*" >&2; exit 2 ;;', "esac", ""]))
    path.chmod(0o755)
    return str(path)


def _listed(gpu: Gpu) -> str:
    migs = (
        f"  MIG {mig.profile.name:<12}Device {number:2d}: (UUID: {mig.uuid})\n"
        for number, mig in enumerate(gpu.mig_devices)
    )
    return f"GPU {gpu.index}: {gpu.product_name} (UUID: {gpu.uuid})\n{''.join(migs)}"


def _xml(gpu: Gpu) -> str:
    fabric = ("N/A", "N/A", "N/A")
    if gpu.fabric is not None:
        fabric = ("Completed", gpu.fabric.cluster_uuid, str(gpu.fabric.clique_id))
    bus = f"0000{gpu.pci_bus_id}".upper()
    memory = "[N/A]" if gpu.memory_bytes is None else f"{gpu.memory_bytes >> 20} MiB"
    mode = "[N/A]" if not gpu.mig_capable else "Enabled" if gpu.mig_enabled else "Disabled"
    return (
        f'<gpu id="{bus}"><product_name>{escape(gpu.product_name or "")}</product_name>'
        f"<product_brand>{(gpu.brand or '').upper()}</product_brand>"
        f"<product_architecture>{gpu.architecture}</product_architecture><uuid>{gpu.uuid}</uuid>"
        f"<mig_mode><current_mig>{mode}</current_mig></mig_mode>"
        f"<fb_memory_usage><total>{memory}</total></fb_memory_usage>"
        f"<minor_number>{gpu.minor}</minor_number><addressing_mode>{gpu.addressing_mode or 'N/A'}</addressing_mode>"
        f"<fabric><state>{fabric[0]}</state><status>Success</status><cliqueId>{fabric[2]}</cliqueId>"
        f"<clusterUUID>{fabric[1]}</clusterUUID></fabric><pci><pci_bus_id>{bus}</pci_bus_id></pci></gpu>"
    )


def _topology(view: View) -> str:
    """The matrix from the simulator's own wiring, not from discovery."""
    state = open_machine(Path(view.driver_root).parent).current()
    gpus = view.inventory.gpus
    names = [f"GPU{gpu.index}" for gpu in gpus]
    affinity = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    lines = ["\t" + "\t".join(f"\x1b[4m{name}" for name in names) + f"{affinity}\x1b[0m"]
    for gpu, name in zip(gpus, names, strict=True):
        cells = []
        for peer in gpus:
            count = nvlink_count(state, state.by_uuid[gpu.uuid], state.by_uuid[peer.uuid])
            cells.append("X" if peer is gpu else f"NV{count}" if count else "SYS")
        numa = "N/A" if gpu.numa_node is None else gpu.numa_node
        lines.append("\t".join([name, *cells, "0-7", str(numa), "", "N/A"]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", ""])


def report(machine: str, directory: Path, replace: dict[str, str] | None = None) -> Report:
    """Return the findings with an nvidia-smi that answers everything, with some words replaced."""
    with looking_at(machine, directory) as view:
        return check(view, full_smi(directory / "nvidia-smi", view, replace))


@pytest.mark.parametrize("machine", machine_names())
def test_machine_that_is_whole_differs_in_nothing(machine: str, tmp_path: Path) -> None:
    with looking_at(machine, tmp_path) as view:
        found = check(view)
    assert found.differences == []
    assert {"discovery", "nvidia-smi", "shutdown"} <= found.checked.keys()


def test_device_file_that_stays_open_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_DEVICE_FILES", str(tmp_path / "nvidia"))
    with looking_at("t4-4", tmp_path) as view, (tmp_path / "nvidia0").open("w"):
        found = check(view)
    assert found.differences == [f"shutdown: {tmp_path}/nvidia0: open after the shutdown of NVML"]


@pytest.mark.parametrize("machine", WIRED)
def test_machine_differs_in_nothing_when_nvidia_smi_answers_everything(machine: str, tmp_path: Path) -> None:
    found = report(machine, tmp_path)
    assert (found.differences, found.unknown) == ([], [])
    assert found.checked["NVLink"]


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case["found"])
def test_difference_is_found_when_nvidia_smi_says_something_else(
    case: dict[str, str], tmp_path: Path
) -> None:
    found = report(case["machine"], tmp_path, {case["replace"]: case["by"]})
    assert case["found"] in "\n".join(found.differences)


def test_text_ends_with_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--simulate", "gb10"]) == OK
    text = capsys.readouterr().out
    assert "gpu-a2eae7ef  0      gpu   NVIDIA GB10" in text
    assert text.endswith("\ngpu-check: nothing differs\n")
    with looking_at("gb10", tmp_path) as view:
        smi = full_smi(tmp_path / "nvidia-smi", view, {"NVIDIA GB10": "NVIDIA GB20"})
    assert main(["--simulate", "gb10", "--nvidia-smi", smi]) == DIFFERENT
    assert capsys.readouterr().out.endswith("\ngpu-check: 1 difference\n")


@tabled("arguments", "why")
def test_check_without_a_machine_says_why_in_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--container-driver-root", "/nowhere"]) == CANNOT_RUN
    error = capsys.readouterr().err
    assert error.startswith("gpu-check: cannot run: ")
    assert (why in error, error.count("\n")) == (True, 1)


def test_wrapper_uses_the_given_python_without_setup(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "hack/gpu-check"), "--simulate", "gb10", "--no-setup"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert done.stdout.endswith("gpu-check: nothing differs\n")


def test_checklist_names_what_is_there() -> None:
    text = (ROOT / "docs/hardware-checklist.md").read_text()
    places = re.findall(r"examples/[\w-]+", text)
    assert places
    for place in places:
        assert (ROOT / place).is_dir(), place
    known = set(COMMANDS.commands)
    assert set(re.findall(r"(?<!-n )gpu-dra-driver (?!daemonset/)(\w+)", text)) <= known


class _Everything:
    """A library that has every function, and each succeeds."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: 0


def test_function_of_nvml_that_changes_something_is_refused() -> None:
    guard = ReadOnlyLibrary(_Everything())
    symbols = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', inspect.getsource(pynvml)))
    codes = {name: getattr(guard, name)() for name in symbols}
    passed = {name for name, code in codes.items() if code == 0}
    others = {name for name in passed if not re.match(r"nvml[A-Z][a-z]+\w*(Get|Is)[A-Z]", name)}
    assert others == {
        "nvmlDeviceRegisterEvents", "nvmlErrorString", "nvmlEventSetCreate", "nvmlEventSetFree", "nvmlInitWithFlags",
        "nvmlShutdown",
    }  # fmt: skip
    assert {name for name in passed if _CHANGES.search(name)} == {name for name in others if "Event" in name}
    assert set(codes.values()) == {0, NO_PERMISSION}
    assert guard.refused == symbols - passed


@pytest.mark.parametrize("arguments", ["", "-c 3", "mig -cgi 19", "-q -x -r", "--query-gpu=uuid -mig 1"])
def test_nvidia_smi_runs_with_arguments_that_change_nothing_alone(arguments: str) -> None:
    assert set(READS) == {("-L",), ("-q", "-x"), ("topo", "-m")}
    with pytest.raises(AssertionError, match="may change something"):
        ask_smi("/bin/false", tuple(arguments.split()))
