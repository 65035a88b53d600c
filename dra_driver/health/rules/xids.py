"""What an Xid number means for new and for running work, as data.

An Xid that is neither an application's fault nor known to be fatal is kept as information: it is told,
but keeps nobody away, because most of the numbers that new drivers bring are harmless and NVML's own
recovery action, which is read after each Xid, tells those that are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dra_driver.model.health import Severity

APPLICATION_XIDS: Mapping[int, str] = {
    13: "a program caused a graphics engine exception",
    31: "a program accessed GPU memory that it does not have",
    43: "a program's channel was stopped",
    45: "a program's channel was removed, mostly because the program ended",
    68: "the video processor raised an exception for a program",
    109: "a context switch of a program took too long",
}
"""Faults of the program that runs, not of the GPU."""

RECOVERY_ACTION_CHANGED = 154
"""Says only that NVML's recovery action is another one, which is read anyway."""

KNOWN_XIDS: Mapping[int, tuple[Severity, str]] = {
    48: (Severity.UNHEALTHY, "uncorrectable memory error"),
    62: (Severity.UNHEALTHY, "the GPU's internal microcontroller stopped"),
    63: (Severity.INFORMATION, "a memory row or page was set aside"),
    64: (Severity.UNHEALTHY, "a memory row or page could not be set aside"),
    74: (Severity.UNHEALTHY, "NVLink error"),
    79: (Severity.UNHEALTHY, "the GPU fell off the bus"),
    92: (Severity.DEGRADED, "very many correctable memory errors"),
    94: (Severity.DEGRADED, "uncorrectable memory error, contained to one program"),
    95: (Severity.UNHEALTHY, "uncorrectable memory error that was not contained"),
    119: (Severity.UNHEALTHY, "the GPU's system processor does not answer"),
    120: (Severity.UNHEALTHY, "the GPU's system processor failed"),
    140: (Severity.UNHEALTHY, "uncorrectable memory error that was not recovered"),
    143: (Severity.UNHEALTHY, "the GPU could not be initialised"),
    **dict.fromkeys(range(145, 151), (Severity.UNHEALTHY, "NVLink error")),
}


@dataclass(frozen=True, slots=True)
class XidPolicy:
    """Xids that the operator wants ignored or taken as fatal besides the known ones; `fatal` wins."""

    ignored: frozenset[int] = frozenset()
    fatal: frozenset[int] = frozenset()


def severity_of_xid(number: int, policy: XidPolicy) -> Severity | None:
    """How bad an Xid is; None for one that says nothing about the GPU."""
    if number in policy.fatal:
        return max(Severity.UNHEALTHY, KNOWN_XIDS.get(number, (Severity.OK, ""))[0])
    if number in policy.ignored or number in APPLICATION_XIDS or number == RECOVERY_ACTION_CHANGED:
        return None
    return KNOWN_XIDS.get(number, (Severity.INFORMATION, ""))[0]


def xid_text(number: int) -> str:
    """`Xid 79: the GPU fell off the bus`; the number alone where the meaning is unknown."""
    meaning = APPLICATION_XIDS.get(number) or KNOWN_XIDS.get(number, (None, ""))[1]
    if number == RECOVERY_ACTION_CHANGED:
        meaning = "the driver asks for another recovery action"
    return f"Xid {number}: {meaning}" if meaning else f"Xid {number}"
