"""How long a command waits for NVML, and what it says then."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.base.file_lock import UseMark
from dra_driver.base.threads import NotAnsweredError
from dra_driver.cli import machine
from dra_driver.cli.machine import answered

WHY = "`dmesg | grep -i nvrm` on the node shows why"
SIMULATED = "NVML is simulated: this host is busy, or `gpu-dra-driver simulate fault` made a call hang"


@pytest.mark.parametrize(
    ("simulate", "is_running", "expected"),
    [
        ("dgx-h100", False, f"NVML has not answered for more than 0.03 s; {SIMULATED}"),
        (None, True, f"NVML has not answered for more than 0.01 s; {WHY}"),
        (None, False, f"NVML has not answered for more than 0.03 s; {WHY}"),
    ],
)
def test_nvml_that_hangs_is_reported_with_the_likely_cause(
    simulate: str | None, is_running: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"_HANGS_S": 0.01, "_WAKES_S": 0.02, "SIMULATED_S": 0.03}.items():
        monkeypatch.setattr(machine, name, seconds)
    mark, gate = UseMark(tmp_path / "worker.lock"), threading.Event()
    if is_running:
        mark.hold()
    settings: Any = SimpleNamespace(simulate=simulate, plugin_directory=tmp_path)
    try:
        with pytest.raises(NotAnsweredError) as caught:
            answered(settings, lambda: gate.wait(60))
    finally:
        gate.set()
        mark.release()
    assert str(caught.value) == expected
