"""What `hack/bench soak` takes for a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes.tables import tabled

ROOT = Path(__file__).parents[2]
JUDGE = """
import sys
sys.path[:0] = ["hack/bench", "hack", "."]
import soak

class Churn:
    counts = {}
    faults = FAULTS
    def __init__(self, node, seed): pass
    def calm(self): pass

class Node:
    states = STATES
    def is_complete(self): return True
    def state(self): return {"records": self.states.pop(0) if len(self.states) > 1 else self.states[0]}

soak.Churn, soak._SETTLE_S = Churn, 0.01
sys.exit(0 if soak.soak(Node(), 0.0, 7) else 1)
"""


@tabled("faults", "states", "code", "words")
def test_soak_judges_what_is_left_and_what_failed(
    faults: list[str], states: list[int], code: int, words: str
) -> None:
    program = JUDGE.replace("FAULTS", repr(faults)).replace("STATES", repr(states))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, words in done.stdout) == (code, True), done.stdout + done.stderr
