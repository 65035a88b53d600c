"""`make bench`: measures the budgets of docs/decisions.md on this machine, and prints them as a table.

The daemon runs as a separate process on a simulated DGX H100, with the playground's API server and kubelet in
this one. Most figures are medians of several runs. The exit code is 1 if a budget is exceeded.

    python hack/bench             everything that takes seconds
    python hack/bench --cycles N  also N prepare/unprepare cycles, to find leaks
    python hack/bench --cluster   instead on the cluster of `make cluster` (root): the kubelet's figures for pods with
                                  and without claims, and a churn with the limits of the DRA test in
                                  kubernetes/perf-tests
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measurements import (
    cpu_of_prepares,
    cpu_of_scrapes,
    crowded,
    growth_over_cycles,
    hand_overs,
    idle,
    parallel_prepares,
    shares,
    single_prepares,
    wipes,
)
from node import Node
from processes import memory_mib, resident_mib

_IDLE_S = 60.0
"""Long enough for each periodic task to run once, except hourly ones."""
SHARED = {"sharing": [{"mode": "shares", "shares": 50, "enforce": "mps"}]}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `budget` is an upper limit in the same unit; None means no limit."""

    what: str
    values: list[float]
    unit: str
    budget: float | None

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool:
        """Whether the median is within the budget."""
        return self.budget is None or self.median <= self.budget


def measure(runs: int, cycles: int) -> list[Row]:
    """Measure all rows. Print a dot after each start of the daemon, because the measurements take minutes."""
    started: list[tuple[float, float]] = []
    memory: list[float] = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch, Node(Path(scratch)) as node:
            started.append((node.registered_s, node.published_s))
        print(".", end="", flush=True, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch, Node(Path(scratch)) as node:
        time.sleep(2.0)  # each Prepare searches an NVIDIA driver that was just installed
        alone, unprepared = single_prepares(node, 20 * runs)
        bursts = parallel_prepares(node, 4 * runs)
        cpu_ms = [cpu_of_prepares(node, 40) for _ in range(runs)]
        wiped = wipes(node, runs)
        memory = [resident_mib(node.daemon)]
        cpu, writes = idle(node, _IDLE_S)
        crowd, crowd_unprepared, spoiled = crowded(node, 10, 1000, 10 * runs)
        rows = [
            Row("start -> registered with the kubelet", [one for one, _ in started], "s", 0.9),
            Row("start -> slices published", [two for _, two in started], "s", 1.2),
            Row("NodePrepareResources, one GPU, alone", alone, "ms", 8),
            Row("NodePrepareResources, mean of 8 at once", bursts, "ms", 30),
            Row("NodeUnprepareResources, alone", unprepared, "ms", None),
            Row("Prepare: 1,000 claims relative to 10 claims", crowd, "", 1.3),
            Row("  Prepare with an unreadable record", spoiled, "", 3),
            Row("Unprepare: 1,000 claims relative to 10 claims", crowd_unprepared, "", 3),
            Row("CPU of one Prepare and Unprepare", cpu_ms, "ms", 11),
            Row("slices back after a wipe", wiped, "s", 0.2),
            Row("resident memory, idle, 8 GPUs", memory, "MiB", 85),
            Row("idle: CPU of one core", [cpu], "%", 0.4),
            Row(f"idle: API writes in {_IDLE_S:.0f} s", [writes], "", 0),
        ]
        if cycles:
            growth, files = growth_over_cycles(node, cycles)
            rows.append(Row(f"memory growth over {cycles} cycles", [growth.memory_mib], "MiB", 2))
            rows.append(Row(f"files left after {cycles} cycles", [files], "", 0))
            rows.append(Row(f"additional descriptors after {cycles} cycles", [growth.descriptors], "", 0))
            rows.append(Row(f"additional threads after {cycles} cycles", [growth.threads], "", 0))
    for what, delay_s, most in (("hand-over", 0.0, 0.5), ("  NVML takes 2 s to open", 2.0, 3.0)):
        with tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch, Node(Path(scratch)) as node:
            if delay_s:
                node.machine.set_fault("nvmlInit*", delay_s=delay_s)
            rows.append(Row(f"{what}: registered -> first Prepare", hand_overs(node, runs), "s", most))
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(runs):
        with (
            tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch,
            Node(Path(scratch), config=SHARED) as node,
        ):
            node.start_mps_host()
            first, later = shares(node, 20)
        cold.append(first)
        warm += later
    rows.append(Row("first MPS Prepare (300 ms daemon start)", cold, "ms", 1000))
    rows.append(Row("Prepare of a share, MPS daemon running", warm, "ms", 8))
    with tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch:
        scraped = cpu_of_scrapes(Path(scratch), 4 * runs)
    rows.append(Row("CPU of a scrape, 8 GPUs with 56 MIG devices", scraped, "ms", 50))
    print(file=sys.stderr)
    return rows


_ON_CLUSTER: Sequence[tuple[str, str, float | None]] = (
    ("start -> slices published", "s", 1.2),
    ("one pod running", "s", None),
    ("  one without a claim", "s", None),
    ("eight pods running", "s", None),
    ("  eight without claims", "s", None),
    ("kubelet's NodePrepareResources, alone", "ms", 8),
    ("kubelet's NodePrepareResources, mean of 8", "ms", 30),
    ("CPU of one Prepare and Unprepare, above idle", "ms", None),
    ("  idle share included", "ms", 11),
    ("eight force-deleted and replaced", "s", None),
    ("  eight replaced without claims", "s", None),
    ("  difference", "s", 2.5),
    ("slices back after a wipe", "s", 0.2),
)
_OF_CHURN: Sequence[tuple[str, str, float | None]] = (
    ("7 of 8 GPUs held, churn: claim allocated", "s", None),
    ("  kubelet's NodePrepareResources", "ms", 100),
    ("  kubelet's NodeUnprepareResources", "ms", 100),
    ("  pod running", "s", 5),
)
"""Label, unit and budget of each measurement. The budgets of the churn are for its 99th percentile."""


def measure_on_cluster(runs: int, idle_s: float, pods: int) -> list[Row]:
    """Measure the rows that need a real kubelet."""
    import on_cluster as real

    cluster = real.prepare_cluster()
    found: dict[str, list[float]] = {"start -> slices published": real.starts(cluster, runs)}
    for what, value in (*real.rounds(cluster, runs), *real.churn(cluster, pods)):
        found.setdefault(what, []).append(value)
    idle_cpu = real.idle_percent(idle_s)
    daemon, *others = real.driver_processes()
    proportional = sum(memory_mib(pid, "Pss") for pid in (daemon, *others))
    rows = [Row(what, found[what], unit, budget) for what, unit, budget in _ON_CLUSTER]
    for what, unit, most in _OF_CHURN:
        cuts = statistics.quantiles(found[what], n=100, method="inclusive")
        limits = {50: None, 90: None, 99: most}
        rows += [Row(f"{what}, p{part}", [cuts[part - 1]], unit, limit) for part, limit in limits.items()]
    return [
        *rows,
        Row("resident memory of the daemon", [memory_mib(daemon, "Rss")], "MiB", 85),
        Row(f"proportional memory of all {1 + len(others)} processes", [proportional], "MiB", None),
        Row(f"idle for {idle_s:g} s: CPU of one core", [idle_cpu], "%", 0.4),
    ]


def table(rows: list[Row]) -> str:
    """Return the rows as an aligned table, with a verdict for each."""
    lines = [f"{'':<48}{'median':>10}{'min':>10}{'max':>10}{'budget':>10}"]
    for row in rows:
        budget = "-" if row.budget is None else f"{row.budget:g}"
        verdict = "" if row.budget is None else ("  ok" if row.is_met else "  MISSED")
        figures = "".join(f"{value:>10.2f}" for value in (row.median, min(row.values), max(row.values)))
        lines.append(
            f"{f'{row.what} ({row.unit})' if row.unit else row.what:<48}{figures}{budget:>10}{verdict}"
        )
    return "\n".join(lines)


def main(options: Sequence[str]) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each measurement (default 5)")
    parser.add_argument("--cycles", type=int, default=0, help="prepare/unprepare cycles to look for leaks")
    parser.add_argument("--cluster", action="store_true", help="measure on the cluster of `make cluster`")
    parser.add_argument(
        "--idle", type=float, default=60.0, help="seconds for the idle figures on the cluster (default 60)"
    )
    parser.add_argument(
        "--churn", type=int, default=100, help="number of pods in the churn on the cluster (default 100)"
    )
    arguments = parser.parse_args(options)
    if arguments.cluster and os.geteuid() != 0:
        print("bench --cluster needs root: it runs a kubelet and a container runtime")
        return 1
    rows = (
        measure_on_cluster(arguments.runs, arguments.idle, max(2, arguments.churn))
        if arguments.cluster
        else measure(arguments.runs, arguments.cycles)
    )
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the end, {arguments.runs} runs\n")
    print(table(rows))
    return 0 if all(row.is_met for row in rows) else 1
