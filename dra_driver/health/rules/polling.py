"""Decides what a poll of a GPU means for its health, including its NVLinks.

A GPU whose links lead to NVSwitches needs all of them, because it reaches every other GPU through each switch. Links
between two GPUs are different: the GPU works with the remaining links, and a link is also down while the other GPU is
reset, in MIG mode, or used by a virtual machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dra_driver.model.dataclass import replace
from dra_driver.model.health import FabricState, HealthState, NvLinks, PolledHealth, Severity
from dra_driver.model.units import counted, named

RECOVERY_ACTION = "recovery-action"
FABRIC = "fabric"
SLOWDOWN = "slowdown"
PCIE_WIDTH = "pcie-width"
PCIE_GENERATION = "pcie-generation"

Finding = tuple[str, str, Severity, str]
"""Key, value, severity and text of a reason."""

_FABRIC: Mapping[FabricState, tuple[Severity, str]] = {
    "pending": (Severity.DEGRADED, "the GPU is not registered with its NVLink fabric yet"),
    "limited": (Severity.DEGRADED, "the GPU's NVLink fabric is degraded"),
    "broken": (Severity.UNHEALTHY, "the GPU cannot use its NVLink fabric"),
}
NVLINK = "nvlink"
NVLINK_ERRORS = "nvlink-errors"

_ERRORS: Final[Mapping[str, str]] = {
    "crc": "data on the GPU's NVLinks was corrupted and resent",
    "recovery": "an NVLink of the GPU failed and recovered; if this repeats, the link may stay down",
    "replay": "data on the GPU's NVLinks was resent",
}


_DRIVER_WANTS = "the NVIDIA driver requests"
_NEXT_RESET = "at the next reset of the GPU"
_SIGNALS: tuple[tuple[str, str, bool, Mapping[object, tuple[str, Severity, str]]], ...] = (
    (RECOVERY_ACTION, "recovery_action", True, {
        1: ("reset", Severity.UNHEALTHY, f"{_DRIVER_WANTS} a GPU reset"),
        2: ("reboot", Severity.UNHEALTHY, f"{_DRIVER_WANTS} a reboot of the node"),
        3: ("drain-p2p", Severity.DEGRADED, f"{_DRIVER_WANTS} that all work with peer access to the GPU stop"),
        4: ("drain-and-reset", Severity.DEGRADED, f"{_DRIVER_WANTS} a GPU reset after all work on it has stopped"),
        5: ("recover-imex-domain", Severity.DEGRADED, f"{_DRIVER_WANTS} a recovery of the IMEX domain"),
        6: ("bus-reset", Severity.UNHEALTHY, f"{_DRIVER_WANTS} a reset of the GPU's bus"),
        7: ("system-reboot", Severity.UNHEALTHY, f"{_DRIVER_WANTS} a reboot of the whole system"),
    }),
    ("row-remap", "remap_failed", True, {
        True: ("failure", Severity.UNHEALTHY, "memory rows could not be remapped; replace the GPU"),
    }),
    ("row-remap", "remap_pending", True, {
        True: ("pending", Severity.DEGRADED, f"memory rows will be remapped {_NEXT_RESET}"),
    }),
    ("page-retirement", "pages_pending", True, {
        True: ("pending", Severity.DEGRADED, f"memory pages will be retired {_NEXT_RESET}"),
    }),
    ("sram", "sram_exceeded", True, {True: (
        "threshold-exceeded", Severity.DEGRADED,
        "the GPU's SRAM has exceeded NVIDIA's error limit; replace the GPU",
    )}),
    ("memory", "memory_unrepairable", True, {
        True: ("unrepairable", Severity.UNHEALTHY, "the GPU's memory cannot be repaired; replace the GPU"),
    }),
    ("bank-remap", "bank_remap_pending", True, {
        True: ("pending", Severity.DEGRADED, f"memory banks will be remapped {_NEXT_RESET}"),
    }),
    ("repair", "repairs_pending", True, {
        "channel": ("channel-pending", Severity.DEGRADED, f"a memory channel will be repaired {_NEXT_RESET}"),
        "tpc": ("tpc-pending", Severity.DEGRADED, f"some of the GPU's processors will be repaired {_NEXT_RESET}"),
    }),
    (SLOWDOWN, "slowdowns", False, {
        "thermal": ("thermal", Severity.INFORMATION, "the GPU is too hot and has slowed down"),
        "power": ("power", Severity.INFORMATION, "the GPU has slowed down because of its power supply"),
        "hardware": ("hardware", Severity.INFORMATION, "the GPU has slowed down because of its hardware"),
    }),
    (PCIE_WIDTH, "pcie_narrow", False, {True: (
        "below-maximum", Severity.INFORMATION, "the PCIe link has fewer lanes than the GPU and the machine support",
    )}),
    (PCIE_GENERATION, "pcie_slow", False, {True: (
        "below-maximum", Severity.INFORMATION,
        "the PCIe link is slower than the GPU and the machine support, although the GPU is busy",
    )}),
    ("confidential-compute", "accepts_work", False, {False: (
        "not-ready", Severity.DEGRADED,
        "confidential computing is on, but the node's GPUs are not set to the ready state yet",
    )}),
)  # fmt: skip
"""The key of the reason, the polled field, whether a bad value needs a reset or a replacement, and what it means."""
_REPAIR_FIELDS = tuple(field for _, field, needs_repair, _ in _SIGNALS if needs_repair)


def reasons_found(polled: PolledHealth) -> Mapping[str, list[Finding]]:
    """Return what a poll found, by the key of the reason. Keys that could not be polled are missing."""
    found: dict[str, list[Finding]] = {}
    for key, field, _, faults in _SIGNALS:
        value = getattr(polled, field)
        if value is not None:
            values = sorted(value) if isinstance(value, frozenset) else [value]
            found.setdefault(key, []).extend((key, *faults[one]) for one in values if one in faults)
    action = polled.recovery_action
    if action and not found[RECOVERY_ACTION]:
        text = f"{_DRIVER_WANTS} recovery action {action}"
        found[RECOVERY_ACTION] = [(RECOVERY_ACTION, str(action), Severity.DEGRADED, text)]
    if polled.fabric is not None:
        found[FABRIC] = fabric_findings(polled.fabric, polled.fabric_text)
    return found


def findings_now(polled: PolledHealth, seen: NvLinks | None = None) -> list[Finding]:
    found = [one for findings in reasons_found(polled).values() for one in findings]
    if polled.nvlinks is not None:
        found += nvlink_findings(polled, seen_nvlinks(seen, polled.nvlinks))
    return found


def requests_action(polled: PolledHealth) -> bool:
    """Whether the NVIDIA driver requests an action, or the GPU needs a reset or a replacement."""
    return any(getattr(polled, field) for field in _REPAIR_FIELDS)


def is_memory_read(polled: PolledHealth) -> bool:
    return polled.failed.isdisjoint(_REPAIR_FIELDS)


def fabric_findings(state: FabricState, detail: str) -> list[Finding]:
    if state not in _FABRIC:
        return []
    severity, text = _FABRIC[state]
    return [(FABRIC, state, severity, f"{text}: {detail}" if detail else text)]


def compared(polled: PolledHealth, others: Iterable[NvLinks | None]) -> PolledHealth:
    """Set `equal_nvlinks`: the most active links that an identical GPU in `others` has."""
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
    if before is None:
        return now
    known = before.to_switches if now.to_switches is None else now.to_switches
    return replace(now, up=tuple(sorted({*before.up, *now.up})), to_switches=known)


def nvlink_findings(polled: PolledHealth, seen: NvLinks) -> list[Finding]:
    now = polled.nvlinks
    if now is None:
        return []
    # A GPU without any active link so far is compared only with GPUs on switches.
    is_on_switches = seen.to_switches or not seen.up
    severity = Severity.DEGRADED if is_on_switches else Severity.INFORMATION
    ends = "to switches" if is_on_switches else "to other GPUs"
    lost = [str(link) for link in seen.up if link not in now.up]
    if lost:
        text = f"NVLinks {ends} have gone down since the boot: {named(lost)}"
        return [(NVLINK, "down", severity, text)]
    most = polled.equal_nvlinks or 0
    if len(now.up) >= most:
        return []
    up = counted(len(now.up), f"NVLink {ends} is", f"NVLinks {ends} are")
    text = f"only {up} up; another GPU of this machine had {most}"
    return [(NVLINK, "fewer", severity, text)]


def nvlink_errors_found(state: HealthState, polled: PolledHealth) -> Mapping[str, list[Finding]]:
    if polled.nvlink_errors is None:
        return {}
    before = state.nvlink_errors or {}
    grown = [kind for kind, count in polled.nvlink_errors.items() if count > before.get(kind, count)]
    return {NVLINK_ERRORS: [(NVLINK_ERRORS, kind, Severity.INFORMATION, _ERRORS[kind]) for kind in grown]}
