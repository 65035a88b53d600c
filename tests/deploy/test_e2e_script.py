"""hack/e2e.py: it removes what it created, and keeps what existed before."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROW = [
    "build the image", "build and download the clusters' programs", "start the cluster",
    "create the simulated machine", "install NVIDIA's CDI hook on it", "install the driver", "run the tests",
]  # fmt: skip


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    place = Path(__file__).parents[2] / "hack" / "e2e.py"
    spec = importlib.util.spec_from_file_location("e2e_script", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    state = tmp_path / "simulator"
    state.mkdir()
    monkeypatch.setattr(module, "SIMULATOR_STATE", state)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setenv("DRA_TEST_KUBECONFIG", "")
    return module


def run(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str, up: bool, failing: str = ""
) -> tuple[int, list[str]]:
    steps: list[str] = []

    def step(title: str, _command: list[str]) -> int:
        steps.append(title)
        return 7 if title == failing else 0

    monkeypatch.setattr(module, "_step", step)
    cluster = SimpleNamespace(is_up=lambda: up, kubeconfig=lambda: Path("/kubeconfig"))
    monkeypatch.setattr(module, "_cluster", lambda: cluster)
    monkeypatch.setattr(sys, "argv", ["e2e.py", *arguments])
    return module.main(), steps


@pytest.mark.parametrize("failing", ["", "run the tests"])
def test_a_cluster_that_was_up_is_used_and_left(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    status, steps = run(script, monkeypatch, up=True, failing=failing)
    assert status == (7 if failing else 0)
    assert steps == ROW
    assert script.SIMULATOR_STATE.is_dir()
    assert "so it is kept" in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["", "build the image"])
def test_an_own_cluster_is_taken_down(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    _, steps = run(script, monkeypatch, "--one-cluster", up=False, failing=failing)
    assert steps[-1] == "remove the cluster"
    assert not script.SIMULATOR_STATE.exists()


@dataclass
class Parts:
    """The clusters side by side, the bundle's last: a shell command in the place of what each does, and its process."""

    commands: list[str]
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)


@pytest.fixture
def parts(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Parts:
    parts = Parts(["exit 0"] * (len(script.APART) + 2))

    def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        part = int(command[command.index("--part") + 1]) if "--part" in command else len(parts.commands) - 1
        network = part in (0, len(parts.commands) - 1)
        assert ("apart" in command) == (not network), "the first cluster has the machine and its network"
        parts.processes.append(parts.popen(["sh", "-c", parts.commands[part]], **options))
        return parts.processes[-1]

    monkeypatch.setattr(script.subprocess, "Popen", started)
    return parts


@pytest.mark.parametrize("failing", [None, 0, 1, 3])
def test_run_fails_when_one_of_the_clusters_fails(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: Parts,
    failing: int | None,
) -> None:
    if failing is not None:
        parts.commands[failing] = "exit 5"
    assert run(script, monkeypatch, up=False)[0] == (0 if failing is None else 5)
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert failed == ([] if failing is None else [f"e2e: cluster {failing + 1}: FAILED with exit code 5"])


def test_an_interrupt_lets_all_clusters_take_themselves_down(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, parts: Parts, tmp_path: Path
) -> None:
    for part in range(len(parts.commands)):
        ended = f"trap 'touch {tmp_path}/ended-{part}; exit 1' TERM"
        parts.commands[part] = f"{ended}; touch {tmp_path}/{part}; while :; do sleep 0.01; done"
    wait = parts.popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(parts.popen, "wait", wait)
        while len(list(tmp_path.glob("?"))) < len(parts.commands):
            time.sleep(0.01)
        raise script.Interrupted

    monkeypatch.setattr(parts.popen, "wait", interrupted)
    assert run(script, monkeypatch, up=False)[0] == 130
    assert len(list(tmp_path.glob("ended-*"))) == len(parts.commands)


def test_each_test_is_on_one_cluster(script: ModuleType) -> None:
    root = Path(__file__).parents[2]
    apart = [script.NODE, *(path for paths in script.APART for path in paths)]
    assert len(set(apart)) == len(apart)
    assert [path for path in apart if not (root / path).exists()] == []
    first = script._tests_of(0)
    assert all(f"--ignore={path}" in first and path not in first for path in apart)
    assert [script._tests_of(part + 1) for part in range(len(script.APART))] == list(map(list, script.APART))


def test_the_matrix_touches_no_cluster_that_is_up(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(script, monkeypatch, "--matrix", up=True) == (1, [])
