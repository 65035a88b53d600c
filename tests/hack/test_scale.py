"""`hack/bench scale` measures what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "hack/bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_scale_measures_a_restart_that_writes_nothing_and_nodes_whose_watches_are_refused() -> None:
    done = run("scale", "--nodes", "4", "--rest", "0.1", "--forget", "2")
    assert done.returncode == 0, done.stderr
    assert "a restart of all publishers writes nothing" in done.stdout
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()}
    assert rows["first publication"][2] == "4", "a write a node"
    assert rows["restart of all"][2] == "0"
    assert rows["at rest again"][1:3] == ["0", "0"]
    assert 4 <= int(rows["410, at first"][1]) <= 4 * 5
    assert rows["410, at first"][2] == rows["410, later"][2] == "0"
