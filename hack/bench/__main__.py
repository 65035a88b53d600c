"""Measures what the driver costs, and what remains after a week of churn.

    python hack/bench [bench]   the budgets of docs/decisions.md, as a table
    python hack/bench soak      a week of churn in five minutes on a simulated node
    python hack/bench scale     the load of many nodes' publishers on the API server

Add `--help` to list the options of a mode.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

MODES = {"bench": "budgets", "soak": "soak", "scale": "scale"}


def main(arguments: list[str]) -> int:
    """Run a mode, and return its exit code: 0 if everything that it checks is good."""
    mode = arguments.pop(0) if arguments[:1] and arguments[0] in MODES else "bench"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the child processes
    return int(import_module(MODES[mode]).main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
