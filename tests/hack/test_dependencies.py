"""What `make` shows while it installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dependencies import progress

_LINES = [
    "Collecting idna==3.20 (from -r requirements.txt (line 1))",
    "  Downloading idna-3.20-py3-none-any.whl (70 kB)",
    "Requirement already satisfied: rich==15.0.0 in ./.venv (from -r requirements.txt (line 9))",
    "Collecting yarl==1.25.1 (from -r requirements.txt (line 12))",
    "Installing collected packages: idna, yarl",
    "Successfully installed idna-3.20 yarl-1.25.1",
]


@pytest.mark.parametrize(
    ("total", "every", "told"),
    [
        (3, 1, ["1 of 3: idna", "2 of 3: rich", "3 of 3: yarl", "unpacking"]),
        (3, 2, ["2 of 3: rich", "unpacking"]),
        (0, 1, ["idna", "rich", "yarl", "unpacking"]),
    ],
)
def test_progress_is_a_line_a_package(total: int, every: int, told: list[str]) -> None:
    assert list(progress(_LINES, total, every)) == told


def test_what_pip_refuses_is_said_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"missing @ file://{tmp_path}/missing-1-py3-none-any.whl\n")
    done = subprocess.run(
        [sys.executable, "hack/dependencies.py", "--no-deps", "-r", str(file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "ERROR" in done.stderr
