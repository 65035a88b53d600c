"""What the processor time of a Prepare and its Unprepare goes into, as a table.

The daemon runs under Python's own profiler. That weighs on code of many small calls, so the shares matter and not the
sum; the sum is that of a daemon without a profiler.
"""

from __future__ import annotations

import os
import pstats
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from measurements import cpu_of_prepares, single_prepares
from node import Node
from processes import wait_for

_HERE = Path(__file__).resolve().parent

# By a part of the path of the code, the first that fits.
_PARTS = {
    "gRPC and protobuf": ("grpc/", "google/", "dra_driver/kubelet/"),
    "asking the API server": (
        "urllib3/",
        "/http/",
        "/email/",
        "urllib/",
        "/ssl.py",
        "socket",
        "dra_driver/kube/",
    ),
    "JSON, records as text": ("/json/", "_codec.py", "json_fields.py"),
    "logs, metrics, reports": (
        "structlog/",
        "logs.py",
        "prometheus_client/",
        "dra_driver/reporting/",
        "dra_driver/observability/",
    ),
    "files, locks": (
        "posix.",
        "fcntl",
        "pathlib.py",
        "posixpath",
        "/os.py",
        "dra_driver/files/",
        "dra_driver/journal/",
        "weakrefset",
    ),
    "the CDI spec": ("dra_driver/cdi/", "dra_driver/host/", "dra_driver/simulator/"),
    "planning, waiting line": (
        "dra_driver/claims/",
        "dra_driver/sharing/",
        "dra_driver/model/",
        "dra_driver/mig/",
        "dra_driver/inventory/",
    ),
    "threads, locks, contexts": ("threading.py", "_thread", "contextlib.py"),
}
_REST = "the rest"

_Function = tuple[str, int, str]
_Callers = Mapping[_Function, tuple[int, int, float, float]]


def part_of(function: _Function) -> str:
    """The part that a function belongs to: by its file, a built-in by its name."""
    file, _, name = function
    where = name if file == "~" else file
    return next((part for part, signs in _PARTS.items() if any(sign in where for sign in signs)), _REST)


def shares(cycles: int) -> tuple[dict[str, float], float]:
    """Processor time by part, as the profiler sees it, and milliseconds of a cycle without it."""
    with tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch, Node(Path(scratch)) as node:
        time.sleep(2.0)
        single_prepares(node, 20)
        plain_ms = cpu_of_prepares(node, cycles)
    with tempfile.TemporaryDirectory(prefix="gpu-dra-bench-") as scratch:
        target = Path(scratch, "profile")
        os.environ |= {"BENCH_PROFILE": str(target), "PYTHONPATH": str(_HERE / "profiled")}
        try:
            node = Node(Path(scratch))
        finally:
            del os.environ["BENCH_PROFILE"], os.environ["PYTHONPATH"]
        with node:
            time.sleep(2.0)
            single_prepares(node, cycles)
            os.kill(node.daemon, signal.SIGPROF)
            wait_for(target.exists)
        found: dict[str, float] = defaultdict(float)
        stats: dict[_Function, tuple[int, int, float, float, _Callers]]
        stats = pstats.Stats(str(target)).stats  # type: ignore[attr-defined]
        for function, (_, _, own_s, _, callers) in stats.items():
            for part, seconds in _shared_out(function, own_s, callers):
                found[part] += max(seconds, 0.0)  # a wait of one thread in another's profile is below
    return found, plain_ms


def _shared_out(function: _Function, own_s: float, callers: _Callers) -> Iterator[tuple[str, float]]:
    """A built-in that serves many parts, such as isinstance, counts where it is called."""
    part = part_of(function)
    if part != _REST or function[0] != "~":
        yield part, own_s
        return
    for caller, (_, _, seconds, _) in callers.items():
        yield part_of(caller), seconds


def table(cycles: int) -> str:
    """A line for each part."""
    found, plain_ms = shares(cycles)
    total = sum(found.values())
    lines = [f"{'CPU of one Prepare and Unprepare':<34}{'share':>8}{'ms':>8}"]
    for part, spent in sorted(found.items(), key=lambda item: -item[1]):
        lines.append(f"{part:<34}{spent / total:>8.0%}{spent / total * plain_ms:>8.2f}")
    lines.append(f"{'together':<34}{'':>8}{plain_ms:>8.2f}")
    return "\n".join(lines)
