"""What one poll of a GPU means for its health, its NVLinks included.

A GPU whose links lead to NVSwitches needs all of them: it reaches every other GPU through each switch. NVIDIA's own
checks have such a GPU drained and reset. Links that join two GPUs are another matter: the GPU works with those that are
left, and a link is down too when the other GPU is reset, in MIG mode, or with a virtual machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dra_driver.model.health import FabricState, HealthState, NvLinks, PolledHealth, Severity
from dra_driver.model.units import named

RECOVERY_ACTION = "recovery-action"
ROW_REMAP = "row-remap"
PAGE_RETIREMENT = "page-retirement"
FABRIC = "fabric"
SLOWDOWN = "slowdown"
CONFIDENTIAL = "confidential-compute"
SRAM = "sram"
MEMORY = "memory"
BANK_REMAP = "bank-remap"
REPAIR = "repair"
PCIE_WIDTH = "pcie-width"
PCIE_GENERATION = "pcie-generation"

Finding = tuple[str, str, Severity, str]
"""Key, value, severity and text of a reason."""

_ACTIONS: Mapping[int, tuple[str, Severity, str]] = {
    1: ("reset", Severity.UNHEALTHY, "the NVIDIA driver requests a GPU reset"),
    2: ("reboot", Severity.UNHEALTHY, "the NVIDIA driver requests a reboot of the node"),
    3: (
        "drain-p2p",
        Severity.DEGRADED,
        "the NVIDIA driver requests an end of the work that uses peer access to the GPU",
    ),
    4: (
        "drain-and-reset",
        Severity.DEGRADED,
        "the NVIDIA driver requests an end of the GPU's work, then a reset",
    ),
    5: ("recover-imex-domain", Severity.DEGRADED, "the NVIDIA driver requests a recovery of the IMEX domain"),
    6: ("bus-reset", Severity.UNHEALTHY, "the NVIDIA driver requests a reset of the GPU's bus"),
    7: ("system-reboot", Severity.UNHEALTHY, "the NVIDIA driver requests a reboot of the whole system"),
}
_FABRIC: Mapping[FabricState, tuple[Severity, str]] = {
    "pending": (Severity.DEGRADED, "the GPU is not registered with its NVLink fabric yet"),
    "limited": (Severity.DEGRADED, "the GPU's NVLink fabric works with limits"),
    "broken": (Severity.UNHEALTHY, "the GPU cannot use its NVLink fabric"),
}
_REPAIRS: Mapping[str, str] = {
    "channel": "a memory channel is repaired with the next reset of the GPU",
    "tpc": "a part of the GPU's processors is repaired with the next reset of the GPU",
}
_SLOWDOWNS: Mapping[str, str] = {
    "thermal": "the GPU is too hot and slows down",
    "power": "the power supply makes the GPU slow down",
    "hardware": "the hardware makes the GPU slow down",
}
NVLINK = "nvlink"
NVLINK_ERRORS = "nvlink-errors"

_ERRORS: Final[Mapping[str, str]] = {
    "crc": "data on the GPU's NVLinks arrived damaged and was sent again",
    "recovery": "an NVLink of the GPU failed and recovered; if this goes on, it may stay down",
    "replay": "data on the GPU's NVLinks was sent again",
}


def reasons_found(polled: PolledHealth) -> Mapping[str, list[Finding]]:
    """What a poll found, by the key of the reason. A key that is missing could not be polled."""
    found: dict[str, list[Finding]] = {}
    if polled.recovery_action is not None:
        found[RECOVERY_ACTION] = _action(polled.recovery_action)
    if polled.remap_pending is not None or polled.remap_failed is not None:
        found[ROW_REMAP] = _remapping(polled)
    if polled.pages_pending is not None:
        text = "memory pages are retired with the next reset of the GPU"
        found[PAGE_RETIREMENT] = (
            [(PAGE_RETIREMENT, "pending", Severity.DEGRADED, text)] if polled.pages_pending else []
        )
    if polled.fabric is not None:
        found[FABRIC] = fabric_findings(polled.fabric, polled.fabric_text)
    if polled.slowdowns is not None:
        found[SLOWDOWN] = [
            (SLOWDOWN, cause, Severity.INFORMATION, _SLOWDOWNS[cause])
            for cause in sorted(polled.slowdowns & _SLOWDOWNS.keys())
        ]
    if polled.sram_exceeded is not None:
        text = "the GPU's SRAM had more errors than NVIDIA allows; replace the GPU"
        found[SRAM] = [(SRAM, "threshold-exceeded", Severity.DEGRADED, text)] if polled.sram_exceeded else []
    if polled.memory_unrepairable is not None:
        text = "memory of the GPU cannot be repaired; replace the GPU"
        found[MEMORY] = (
            [(MEMORY, "unrepairable", Severity.UNHEALTHY, text)] if polled.memory_unrepairable else []
        )
    if polled.bank_remap_pending is not None:
        text = "memory banks are remapped with the next reset of the GPU"
        found[BANK_REMAP] = (
            [(BANK_REMAP, "pending", Severity.DEGRADED, text)] if polled.bank_remap_pending else []
        )
    if polled.repairs_pending is not None:
        found[REPAIR] = [
            (REPAIR, f"{part}-pending", Severity.DEGRADED, _REPAIRS[part])
            for part in sorted(polled.repairs_pending & _REPAIRS.keys())
        ]
    if polled.pcie_narrow is not None:
        text = "the PCIe link has fewer lanes than the GPU and the machine allow"
        found[PCIE_WIDTH] = (
            [(PCIE_WIDTH, "below-maximum", Severity.INFORMATION, text)] if polled.pcie_narrow else []
        )
    if polled.pcie_slow is not None:
        text = "the PCIe link is slower than the GPU and the machine allow, although the GPU works"
        found[PCIE_GENERATION] = (
            [(PCIE_GENERATION, "below-maximum", Severity.INFORMATION, text)] if polled.pcie_slow else []
        )
    if polled.accepts_work is not None:
        text = "confidential computing is on, and the ready state of the node's GPUs is not set yet"
        found[CONFIDENTIAL] = (
            [] if polled.accepts_work else [(CONFIDENTIAL, "not-ready", Severity.DEGRADED, text)]
        )
    return found


def asks_for_action(polled: PolledHealth) -> bool:
    """Whether the NVIDIA driver requests an action, or the GPU needs a reset or a replacement."""
    memory = polled.remap_pending or polled.remap_failed or polled.pages_pending or polled.bank_remap_pending
    parts = polled.sram_exceeded or polled.memory_unrepairable or polled.repairs_pending
    return bool(polled.recovery_action or memory or parts)


_ACTION_QUERIES = frozenset(
    {"recovery_action", "remapped_rows", "pages_pending", "bank_remap", "memory", "repair", "sram"}
)


def is_memory_read(polled: PolledHealth) -> bool:
    """Whether none of the values of `asks_for_action` is missing because its query failed."""
    return polled.failed.isdisjoint(_ACTION_QUERIES)


def _action(number: int) -> list[Finding]:
    if number == 0:
        return []
    unknown = (str(number), Severity.DEGRADED, f"the NVIDIA driver requests recovery action {number}")
    return [(RECOVERY_ACTION, *_ACTIONS.get(number, unknown))]


def _remapping(polled: PolledHealth) -> list[Finding]:
    found: list[Finding] = []
    if polled.remap_failed:
        text = "memory rows could not be remapped; the GPU needs a replacement"
        found.append((ROW_REMAP, "failure", Severity.UNHEALTHY, text))
    if polled.remap_pending:
        text = "memory rows are remapped with the next reset of the GPU"
        found.append((ROW_REMAP, "pending", Severity.DEGRADED, text))
    return found


def fabric_findings(state: FabricState, detail: str) -> list[Finding]:
    """None for a fabric that is ready or absent; `detail` says what is wrong."""
    if state not in _FABRIC:
        return []
    severity, text = _FABRIC[state]
    return [(FABRIC, state, severity, f"{text}: {detail}" if detail else text)]


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
