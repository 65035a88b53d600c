"""Hold our verdicts on selectors against those of Kubernetes' compiler: a fixed list, and expressions of a grammar.

python hack/celcheck [--number 10000] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hack")]

from celcheck.compare import build, compare, fixed  # noqa: E402
from celcheck.grammar import Grammar  # noqa: E402


def main() -> int:
    """1 if there is a difference."""
    parser = argparse.ArgumentParser(prog="celcheck", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=10_000, help="of expressions of the grammar")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run")
    options = parser.parse_args()
    if shutil.which("go") is None:
        print("selectors are not compared with Kubernetes' compiler: that needs Go")
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    grammar = Grammar(seed)
    found = compare(build(), [*fixed(), *(grammar.expression() for _ in range(options.number))])
    print(
        f"selectors (seed {seed}): {found.taken} taken and {found.refused} refused as by Kubernetes, "
        f"{found.not_judged} not judged, {len(found.differences)} differences"
    )
    for difference in found.differences:
        print(f"  {difference}")
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
