"""The results of `doctor`'s checks.

After a FAIL, some pod that asks for a device of this node does not get it. What could not be checked is not a FAIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from dra_driver.model.dataclass import dataclass
from dra_driver.model.health import HEALTH_FILE
from dra_driver.model.problems import NodeProblem, ProblemCode

Status = Literal["OK", "WARN", "FAIL", "SKIP"]

CODES_THAT_WARN: frozenset[ProblemCode] = frozenset({
    "check-failed", "health-unknown", "memory-unclaimed", "mps-not-exclusive", "mps-users-wait",
    "scheduler-outdated", "slice-fields-dropped",
})  # fmt: skip
"""All other problems keep some pod from getting its device, except `newer-files` of the health file."""
_WORST_FIRST = ("FAIL", "WARN", "SKIP", "OK")


@dataclass(frozen=True, slots=True)
class Finding:
    """`version` is that of the checked component."""

    status: Status
    seen: str
    remedy: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    check: str
    finding: Finding


def ok(seen: str, version: str | None = None) -> Finding:
    return Finding("OK", seen, version=version)


def warn(seen: str, remedy: str) -> Finding:
    """Return the finding for what works with restrictions, may soon fail, or could not be checked."""
    return Finding("WARN", seen, remedy)


def fail(seen: str, remedy: str) -> Finding:
    return Finding("FAIL", seen, remedy)


def skip(seen: str) -> Finding:
    """Return the finding for what is not needed here, or covered by another check."""
    return Finding("SKIP", seen)


def keeps_pods_away(problem: NodeProblem) -> bool:
    # Without its health file the plugin reads the health from the GPUs.
    is_of_health = problem.code == "newer-files" and problem.subject.endswith(f"/{HEALTH_FILE}")
    return problem.code not in CODES_THAT_WARN and not is_of_health


def worst(findings: Iterable[Finding]) -> Finding:
    return min(findings, key=lambda finding: _WORST_FIRST.index(finding.status))


_VERIFIED = {
    "driver": (("GPUs", "kernel driver", "driver root", "NVML", "device nodes"), "kernel driver"),
    "runtime": (("runtime", "CDI directory"), "node"),
}
"""The checks that verify a subject, and the one that reports its version."""


def verified(outcomes: Sequence[Outcome]) -> dict[str, dict[str, str | None]]:
    """Return what Kubernetes AI conformance requires."""
    versions = {one.check: one.finding.version for one in outcomes}
    return {
        subject: {
            "status": worst(one.finding for one in outcomes if one.check in checks).status,
            "version": versions.get(of_version),
        }
        for subject, (checks, of_version) in _VERIFIED.items()
    }
