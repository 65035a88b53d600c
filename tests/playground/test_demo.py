"""`make demo` on every simulated machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from playground.demo import demo

from dra_driver.errors import InvalidConfigError
from dra_driver.simulator import machine_names
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
WITHOUT_MIG = {"a10-8", "dgx-1v", "dgx-2", "gb10", "l40s-8", "t4-4"}
WITHOUT_NVLINK = {"a10-8", "gb10", "l40s-8", "rtx-pro-6000-8", "t4-4", "vm-passthrough"}
ONE_WHOLE_GPU = {"gb10", "vm-passthrough"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, memory_path: Path):
    """The monitor notices its stop only after its wait for events. A disk would take half of the time."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("tempfile.tempdir", str(memory_path))


@pytest.mark.parametrize("machine", machine_names())
def test_demo_runs_to_its_end_on_every_machine(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    demo(machine)
    shown = capsys.readouterr().out
    assert "held by claim default/training" in shown
    assert "claim records: 0" in shown
    assert ("A claim for a MIG device" in shown) == (machine not in WITHOUT_MIG)
    assert ("A claim for two GPUs in one NVLink domain" in shown) == (machine not in WITHOUT_NVLINK)
    assert ("A claim for a GPU\n" in shown) == (machine in ONE_WHOLE_GPU)
    assert len(re.findall(r"^    gpu-\w+  ->", shown, re.MULTILINE)) >= 1 + (machine not in ONE_WHOLE_GPU)
    numbers = [int(number) for number in re.findall(r"^(\d)\. ", shown, re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]


def test_unknown_machine_is_one_sentence_with_those_that_there_are() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        demo("dgx-h1000")
    done = subprocess.run(
        [sys.executable, "hack/playground", "run", "--simulate", "dgx-h1000"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"playground: {refused.value}\n")
    assert all(name in done.stderr for name in machine_names())
