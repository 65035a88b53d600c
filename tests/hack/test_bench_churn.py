"""The churn of `hack/bench --cluster`: what it holds, what it takes, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHURN = """
import json, sys
sys.path[:0] = ["hack/bench", "hack", "."]
import budgets, on_cluster

class Cluster:
    def __init__(self):
        self.running, self.seen = [], []
        self.spent = {"NodePrepareResources": [0.0, 0], "NodeUnprepareResources": [0.0, 0]}
        self.made = 0
    def _called(self, call, seconds):
        self.spent[call][0] += seconds
        self.spent[call][1] += 1
    def start_pods(self, count, *, claims):
        assert claims
        names = [f"pod-{self.made + number}" for number in range(count)]
        self.made += count
        self.running += names
        for _ in names:
            self._called("NodePrepareResources", 0.004)
        self.seen.append(len(self.running))
        return names
    def wait_running(self, names):
        assert set(names) <= set(self.running)
    def claim_of(self, pod):
        return {"status": {"allocation": {}}} if pod in self.running else {}
    def is_allocated(self, pod):
        return bool(self.claim_of(pod))
    def prepared(self, call="NodePrepareResources"):
        return tuple(self.spent[call])
    def end_pods(self, names, *, others=0):
        self.running = [one for one in self.running if one not in names]
        assert len(self.running) == others
        self._called("NodeUnprepareResources", 0.002)

cluster = Cluster()
found = on_cluster.churn(cluster, 20)
rows = budgets.percentiles("what", [float(number) for number in range(1, 102)], "ms", 50)
print(json.dumps({
    "seen": cluster.seen,
    "left": cluster.running,
    "counts": [len(values) for values in (found.allocated, found.started, found.prepare_ms, found.unprepare_ms)],
    "prepare": round(found.prepare_ms[-1], 3),
    "unprepare": round(found.unprepare_ms[-1], 3),
    "rows": [[row.what, row.median, row.is_met] for row in rows],
}))
"""


def test_seven_of_eight_are_held_and_pods_take_the_last_one_in_turn() -> None:
    command = [sys.executable, "-c", CHURN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {
        "seen": [7, *[8] * 20],
        "left": [],
        "counts": [20, 20, 20, 20],
        "prepare": 4.0,
        "unprepare": 2.0,
        "rows": [["what, p50", 51.0, True], ["what, p90", 91.0, True], ["what, p99", 100.0, False]],
    }
