"""What a check of `doctor` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL", "SKIP"]

CODES_THAT_FAIL = frozenset({
    "claims-failing", "disk-not-writable", "driver-files-missing", "foreign-driver", "gpus-unavailable",
    "mps-daemon-failed", "mps-host-missing", "not-registered", "plugin-not-running", "slices-not-published",
    "waiting-for-driver",
})  # fmt: skip
"""Problems of the node with which pods do not get their devices."""
_WORST_FIRST = ("FAIL", "WARN", "SKIP", "OK")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen, and what to do about it. `SKIP`: it could not be checked. `version` is of what was checked."""

    status: Status
    seen: str
    remedy: str | None = None
    version: str | None = None


def ok(seen: str, version: str | None = None) -> Finding:
    """All is well."""
    return Finding("OK", seen, version=version)


def warn(seen: str, remedy: str) -> Finding:
    """Works, but not as well as it could, or not for long."""
    return Finding("WARN", seen, remedy)


def fail(seen: str, remedy: str) -> Finding:
    """Pods will not get their devices."""
    return Finding("FAIL", seen, remedy)


def skip(seen: str) -> Finding:
    """It could not be checked."""
    return Finding("SKIP", seen)


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of those that are the most serious."""
    return min(findings, key=lambda finding: _WORST_FIRST.index(finding.status))


_VERIFIED = {
    "driver": (("GPUs", "kernel driver", "driver root", "NVML", "device nodes"), "kernel driver"),
    "runtime": (("runtime", "CDI directory"), "node"),
}
"""By subject: the checks that show whether it is as it should be, and the one that knows its version."""


def verified(found: Sequence[tuple[str, Finding]]) -> dict[str, dict[str, str | None]]:
    """What AI conformance has platforms verify, from the names of checks and their findings: of the NVIDIA driver and
    of the container runtime the worst status, and the version, None where it is not known."""
    versions = {check: finding.version for check, finding in found}
    return {
        subject: {
            "status": worst(finding for check, finding in found if check in checks).status,
            "version": versions.get(of_version),
        }
        for subject, (checks, of_version) in _VERIFIED.items()
    }
