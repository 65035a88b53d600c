"""What is wrong with this node now, in sentences for operators.

Each part of the plugin that can be in trouble returns its problems whenever it is called. `reporting/node_problems.py`
calls them all and turns what it gets into events, readiness notes, a metric and the file that `top` reads. So a problem
ends when its part stops returning it, and never because some other thing happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dra_driver.model.claim import ClaimRef

ProblemCode = Literal[
    "check-failed",
    "claims-failing",
    "disk-not-writable",
    "driver-files-missing",
    "foreign-driver",
    "gpu-unresponsive",
    "gpus-unavailable",
    "health-unknown",
    "mps-daemon-failed",
    "mps-host-missing",
    "not-registered",
    "nvml-unavailable",
    "passthrough-unavailable",
    "plugin-not-running",
    "slices-not-published",
    "waiting-for-driver",
]
"""The label `problem` of the metric `nvidia_dra_problems`; users write alerts with it, so it keeps its words."""
FOUND_BY_TOP: Final = frozenset({"nvml-unavailable", "plugin-not-running"})
"""What the plugin cannot report of itself."""


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One problem. `subject` names the device, claim or path that has it, and is empty for the node as a whole.

    `text` is one sentence: what is wrong, with which object, and what to do now. Two problems with the same code and
    subject are the same problem, even if the text changes.

    >>> NodeProblem("gpu-unresponsive", "GPU gpu-0 has not answered NVML for 40 s; drain and reboot the node", "gpu-0")
    """

    code: ProblemCode
    text: str
    subject: str = ""


@dataclass(frozen=True, slots=True)
class ShownProblem:
    """A problem, and since when it has lasted, in seconds since 1970."""

    problem: NodeProblem
    since: int


@dataclass(frozen=True, slots=True)
class FailingClaim:
    """A claim whose last Prepare or Unprepare failed: `count` times in a row, since `since`, last at `last_at`, both in
    seconds since 1970. `error` is the last error, in one line."""

    ref: ClaimRef
    operation: Literal["prepare", "unprepare"]
    since: int
    last_at: int
    count: int
    error: str
