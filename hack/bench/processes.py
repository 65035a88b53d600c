"""What a process uses, and waiting for what it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Wear:
    """What a process has at one moment."""

    memory_mib: float
    descriptors: int
    threads: int


def wear(pid: int) -> Wear:
    """Raises: OSError if the process is gone."""
    counts = [len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task")]
    return Wear(resident_mib(pid), *counts)


def memory_mib(pid: int, what: str, file: str = "smaps_rollup") -> float:
    """`Rss` or `Pss` of a process, or a line of another file of its directory in /proc."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{what}:"))


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    return memory_mib(pid, "VmRSS", "status")


def ticks_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, including threads that have exited, with a resolution of 0.01 s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def threads_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of the living threads in nanosecond resolution: when idle a clock tick is a
    tenth of the budget.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def wait_for(
    done: Callable[[], Any], timeout_s: float = _WAIT_S, every_s: float = 0.002, what: str = "it"
) -> Any:
    """The first true value. Raises: TimeoutError that says what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not (value := done()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(every_s)
    return value
