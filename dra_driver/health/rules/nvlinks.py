"""What the NVLinks of a GPU mean for its health.

A GPU whose links lead to NVSwitches needs all of them: it reaches every other GPU through each switch. NVIDIA's own
checks have such a GPU drained and reset. Links that join two GPUs are another matter: the GPU works with those that are
left, and a link is down too when the other GPU is reset, in MIG mode, or with a virtual machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dra_driver.health.rules.polling import Finding
from dra_driver.model.health import HealthState, NvLinks, PolledHealth, Severity
from dra_driver.model.units import named

NVLINK = "nvlink"
NVLINK_ERRORS = "nvlink-errors"

_ERRORS: Final[Mapping[str, str]] = {
    "crc": "data on the GPU's NVLinks arrived damaged and was sent again",
    "recovery": "an NVLink of the GPU failed and recovered; if this goes on, it may stay down",
    "replay": "data on the GPU's NVLinks was sent again",
}


def compared(polled: PolledHealth, others: Iterable[NvLinks | None]) -> PolledHealth:
    """The poll with the number of links that the equal ones of the `others` have had up."""
    mine = polled.nvlinks
    if mine is None:
        return polled
    equal = [
        len(other.up)
        for other in others
        if other is not None
        and other.product_name == mine.product_name is not None
        and (mine.to_switches == other.to_switches or (not mine.up and other.to_switches))
    ]
    return replace(polled, equal_nvlinks=max(equal, default=None))


def seen_nvlinks(before: NvLinks | None, now: NvLinks) -> NvLinks:
    """All links that were up: in `before`, or now."""
    if before is None:
        return now
    known = before.to_switches if now.to_switches is None else now.to_switches
    return replace(now, up=tuple(sorted({*before.up, *now.up})), to_switches=known)


def nvlink_findings(polled: PolledHealth, seen: NvLinks) -> list[Finding]:
    """What is wrong with the links that the poll has read; `seen` are those that were up since the boot."""
    now = polled.nvlinks
    if now is None:
        return []
    # A GPU that has had no link up is compared with those on switches alone.
    is_on_switches = seen.to_switches or not seen.up
    severity = Severity.DEGRADED if is_on_switches else Severity.INFORMATION
    links = f"NVLinks to {'switches' if is_on_switches else 'other GPUs'}"
    lost = [str(link) for link in seen.up if link not in now.up]
    if lost:
        text = f"{links} that were up since the boot are down: {named(lost)}"
        return [(NVLINK, "down", severity, text)]
    most = polled.equal_nvlinks or 0
    if len(now.up) >= most:
        return []
    text = f"only {len(now.up)} {links} are up, and {most} on an equal GPU of the machine"
    return [(NVLINK, "fewer", severity, text)]


def nvlink_errors_found(state: HealthState, polled: PolledHealth) -> Mapping[str, list[Finding]]:
    """A reason for each count that grew since it was read last. Nothing if no count was read."""
    if polled.nvlink_errors is None:
        return {}
    before = state.nvlink_errors or {}
    grown = [kind for kind, count in polled.nvlink_errors.items() if count > before.get(kind, count)]
    return {NVLINK_ERRORS: [(NVLINK_ERRORS, kind, Severity.INFORMATION, _ERRORS[kind]) for kind in grown]}
