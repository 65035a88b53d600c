"""`make soak`: runs a week of churn in minutes on a simulated node, and checks what remains.

Claims of every kind are prepared and unprepared while the daemon and the kubelet restart, the daemon is killed, the
NVIDIA driver is reloaded, GPUs fail, the API server is unreachable and the machine reboots. At the end, records, CDI
files, MIG instances, modes and settings of GPUs, MPS daemons and slices must be the same as on a fresh node. The exit
code is 1 if they are not, or if a claim failed while nothing was broken.

    python hack/bench soak               about five minutes
    python hack/bench soak --minutes 60  an hour
    python hack/bench soak --seed 7      the same choices again
    python hack/bench soak --random 600  calls, kills and failing tools in parallel, for ten minutes
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import random_churn
from churn import Churn
from node import SoakNode
from processes import wait_for
from random_churn import RandomNode

_SETTLE_S = 150.0
"""Some taints stay for a minute after the last error."""
_MAX_SHOWN = 20


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return the names of the values that differ."""
    return [name for name in before if before[name] != after[name]]


def soak(node: SoakNode, minutes: float, seed: int) -> bool:
    """Run the churn. Return whether nothing remains on the node and nothing failed without a cause."""
    fresh = settled(node)
    churn = Churn(node, seed)
    cycles = 0
    until = time.monotonic() + minutes * 60
    while time.monotonic() < until:
        churn.cycle()
        cycles += 1
    churn.calm()
    after = settled(node, like=fresh)
    print(f"\n{cycles} cycles with seed {seed}")
    for name, count in sorted(churn.counts.items()):
        print(f"  {count:>7}  {name}")
    return judged(fresh, after, [f"failed while nothing was broken: {fault}" for fault in churn.faults])


def judged(fresh: dict[str, object], after: dict[str, object], faults: Sequence[str]) -> bool:
    """Return whether there are no faults and nothing remains. Print what is wrong."""
    left = differences(fresh, after)
    for fault in faults[:_MAX_SHOWN]:
        print(f"  {fault}")
    for name in left:
        old, new = fresh[name], after[name]
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = ({k: v for k, v in one.items() if old.get(k) != new.get(k)} for one in (old, new))
        print(f"NOT AS ON A FRESH NODE: {name}\n  fresh: {old}\n  now:   {new}")
    if not left:
        print("records, CDI files, MIG, settings, MPS daemons and slices are the same as on a fresh node")
    return not left and not faults


def settled(node: SoakNode, like: dict[str, object] | None = None) -> dict[str, object]:
    """Return the node's state, as soon as it equals `like`, or after `_SETTLE_S`."""
    wait_for(node.is_complete, what="all slices")
    if like is not None:
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not differences(like, node.state()), _SETTLE_S, 0.01, "the node to settle")
    return node.state()


def main(options: Sequence[str]) -> int:
    """Run the soak test, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="duration (default 5)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of an earlier run")
    parser.add_argument(
        "--random", type=float, metavar="SECONDS", help="run everything in parallel for this long"
    )
    arguments = parser.parse_args(options)
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1_000_000)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        is_random = arguments.random is not None
        node = RandomNode(Path(scratch)) if is_random else SoakNode(Path(scratch))
        try:
            node.start()
            if isinstance(node, RandomNode):
                as_new = judged(*random_churn.churn(node, arguments.random, seed))
            else:
                as_new = soak(node, arguments.minutes, seed)
        except BaseException:
            print("the daemon's last log lines:", *node.last_log_lines(), sep="\n  ")
            raise
        finally:
            node.stop()
            node.stop_mps_daemons()
    return 0 if as_new else 1
