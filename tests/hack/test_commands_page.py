"""docs/commands.md says what the commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_page_is_what_the_commands_print_now() -> None:
    done = subprocess.run(
        [sys.executable, "hack/record/commands_page.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"docs/commands.md differs: run `make golden`\n{done.stdout}{done.stderr}"
