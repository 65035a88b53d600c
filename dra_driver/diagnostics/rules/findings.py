"""What a check of `doctor` answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL", "SKIP"]

_MOST_NAMED = 4
_WORST_FIRST = ("FAIL", "WARN", "SKIP", "OK")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen, and what to do about it. `SKIP`: it could not be checked."""

    status: Status
    seen: str
    remedy: str | None = None


def ok(seen: str) -> Finding:
    """All is well."""
    return Finding("OK", seen)


def warn(seen: str, remedy: str) -> Finding:
    """Works, but not as well as it could, or not for long."""
    return Finding("WARN", seen, remedy)


def fail(seen: str, remedy: str) -> Finding:
    """Pods will not get their devices."""
    return Finding("FAIL", seen, remedy)


def skip(seen: str) -> Finding:
    """Nothing here can answer it."""
    return Finding("SKIP", seen)


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of those that are the most serious."""
    return min(findings, key=lambda finding: _WORST_FIRST.index(finding.status))


def named(items: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(items) - _MOST_NAMED
    return ", ".join(items[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
