"""hack/e2e.py: what it makes it takes away, and what was there before stays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


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
    made = ["build the image", "bring the cluster up", "make the simulated machine", "install the driver"]
    assert steps == [*made, "run the tests"]
    assert script.SIMULATOR_STATE.is_dir()
    assert "is left in place" in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["", "build the image"])
def test_an_own_cluster_is_taken_down(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    _, steps = run(script, monkeypatch, up=False, failing=failing)
    assert steps[-1] == "take the cluster down"
    assert not script.SIMULATOR_STATE.exists()


def test_an_own_cluster_is_kept_when_asked(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = run(script, monkeypatch, "--keep", up=False)
    assert steps[-1] == "run the tests"
