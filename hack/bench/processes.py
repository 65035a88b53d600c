"""Measures what a process uses, and waits for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WAIT_S = 60.0
_SCHEDULER_CLOCK = 2


@dataclass(frozen=True, slots=True)
class Wear:
    """The resources of a process at one moment."""

    memory_mib: float
    descriptors: int
    threads: int


def wear(pid: int) -> Wear:
    """Return the resources of a process. Raises: OSError if the process has exited."""
    counts = [len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task")]
    return Wear(resident_mib(pid), *counts)


def memory_mib(pid: int, what: str, file: str = "smaps_rollup") -> float:
    """Return `Rss` or `Pss` of a process in MiB, or the value of a line in another file of /proc/PID."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{what}:"))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return memory_mib(pid, "VmRSS", "status")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, including threads that have exited, with a resolution of a nanosecond."""
    return time.clock_gettime(~pid << 3 | _SCHEDULER_CLOCK)  # clock_getcpuclockid(3)


def wait_for(
    done: Callable[[], Any], timeout_s: float = _WAIT_S, every_s: float = 0.002, what: str = "it"
) -> Any:
    """Wait until `done` returns a true value, and return it. Raises: TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout_s
    while not (value := done()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(every_s)
    return value
