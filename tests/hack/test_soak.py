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


HOLDERS = """
import sys
sys.path[:0] = ["hack/bench", "hack", "."]
from churn import Life
from dra_driver.model.claim import ClaimRef, Prepared, PreparedDevice
from random_churn import Holders

def slices(*numbers):
    return [{"counterSet": "gpu", "counters": {f"memory-slice-{number}": {} for number in numbers}}]

class Node:
    def devices(self):
        return [
            {"name": "whole", "consumesCounters": slices(0, 1)},
            {"name": "part", "consumesCounters": slices(1)},
            {"name": "other", "consumesCounters": slices(0)},
            {"name": "shared", "allowMultipleAllocations": True},
        ]
    def has_spec(self, life):
        return life.ref.uid not in GONE

holders = Holders(Node())
lives = {}
for uid, kind, device in TAKEN:
    lives.setdefault(uid, Life(ClaimRef("default", uid, uid), kind))
    if device is None:
        holders.drop(lives[uid])
    else:
        holders.take(lives[uid], Prepared((PreparedDevice(("gpu",), "pool", device, ()),)))
print(holders.faults)
"""


@tabled("taken", "gone", "faults")
def test_two_claims_that_hold_one_device_are_a_fault(
    taken: list[object], gone: list[str], faults: str
) -> None:
    program = HOLDERS.replace("TAKEN", repr(taken)).replace("GONE", repr(gone))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == faults
