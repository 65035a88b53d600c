"""The meaning of each Xid number, as data.

`CATALOG` is NVIDIA's public Xid catalog for Ampere and newer GPUs, reworded. What follows from an action is the
plugin's policy. If the number alone does not decide, the plugin relies on NVML's recovery action. Older NVIDIA drivers
report none (the catalog mentions it from R565 on); then such an Xid keeps new work away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.health import Severity


@dataclass(frozen=True, slots=True)
class Action:
    """The catalog's immediate action for an Xid, and what follows from it.

    `severity` None means that the Xid says nothing about the GPU; if it is `undecided`, NVML's recovery action decides.
    `advice` ends the text of an Xid; if it `ends_work`, only of one that does more than inform. `remedy` is a key in
    `model.remedies`. Time ends a program's fault; any other bad Xid lasts until a reset, or until NVML requests no
    action.
    """

    name: str
    severity: Severity | Literal["undecided"] | None
    advice: str = ""
    ends_work: bool = False
    is_program_fault: bool = False
    remedy: str = "xid"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    action: Action
    text: str


_NONE = Action("", "undecided")
IGNORE = Action("IGNORE", Severity.INFORMATION)
RESTART_APP = Action("RESTART_APP", None, "restart the program", is_program_fault=True)
RESET_GPU = Action("RESET_GPU", Severity.UNHEALTHY, "reset the GPU", ends_work=True)
RESTART_BM = Action("RESTART_BM", Severity.UNHEALTHY, "reboot the node", ends_work=True, remedy="reboot-xid")
RESTART_VM = replace(RESTART_BM, name="RESTART_VM", advice="restart the virtual machine")
CHECK_MECHANICALS = Action(
    "CHECK_MECHANICALS", Severity.DEGRADED, "check the power cables of the GPU", remedy="mechanical-xid"
)
CHECK_UVM = Action("CHECK_UVM", "undecided")
CONTACT_SUPPORT = Action("CONTACT_SUPPORT", "undecided", "contact NVIDIA")
UPDATE_SWFW = Action("UPDATE_SWFW", Severity.INFORMATION, "update the NVIDIA driver")
WORKFLOW_XID_45 = Action("WORKFLOW_XID_45", None, is_program_fault=True)
WORKFLOW_XID_48 = replace(RESET_GPU, name="WORKFLOW_XID_48")
WORKFLOW_NVLINK_ERR = replace(RESET_GPU, name="WORKFLOW_NVLINK_ERR")
WORKFLOW_NVLINK5_ERR = replace(RESET_GPU, name="WORKFLOW_NVLINK5_ERR", severity="undecided")
XID_154 = Action("XID_154", None)
# The plugin decides otherwise than NVIDIA about tests, programs' faults, failing memory, and what is no fault.
_HARMLESS = replace(IGNORE, severity=None)
_OF_PROGRAM = replace(_HARMLESS, is_program_fault=True)
_FAILING_MEMORY = replace(IGNORE, severity=Severity.DEGRADED)
_CONTAINED = replace(RESTART_APP, severity=Severity.DEGRADED)
_INFORMS = replace(_NONE, severity=Severity.INFORMATION)

CATALOG: Final[Mapping[int, CatalogEntry]] = {
    number: CatalogEntry(action, text)
    for numbers, action, text in (
        ((8,), RESTART_APP, "a program's channel was idle for too long"),
        ((11, 25, 32), RESTART_APP, "the GPU received commands that are not valid"),
        ((13,), RESTART_APP, "a program caused a graphics engine exception"),
        ((14,), _HARMLESS, "an injected error"),
        ((31,), RESTART_APP, "a program accessed invalid GPU memory"),
        ((37, 38), IGNORE, "an error in the NVIDIA driver's firmware"),
        ((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), RESTART_APP,
         "a copy engine raised an exception for a program"),
        ((43,), _OF_PROGRAM, "a program's channel was stopped"),
        ((44,), IGNORE, "a graphics engine fault during a context switch"),
        ((45,), WORKFLOW_XID_45, "a program's channel was removed, usually because the program exited"),
        ((46,), RESET_GPU, "the GPU stopped processing"),
        ((48,), WORKFLOW_XID_48, "uncorrectable memory error"),
        ((54,), CHECK_MECHANICALS, "the GPU's auxiliary power is not connected"),
        ((62,), RESET_GPU, "the GPU's internal microcontroller stopped"),
        ((63,), IGNORE, "a memory row was remapped or a memory page was retired"),
        ((64,), RESET_GPU, "a memory row could not be remapped or a memory page could not be retired"),
        ((66, 67), IGNORE, "the NVIDIA driver made an illegal access"),
        ((60, 68, 83, 84, 88, 89, 96, 97, 98), RESTART_APP, "the video processor raised an exception for a program"),
        ((69,), RESTART_APP, "a program used a graphics engine class incorrectly"),
        ((74,), WORKFLOW_NVLINK_ERR, "NVLink error"),
        ((78,), UPDATE_SWFW, "a virtual GPU could not be started"),
        ((79,), RESTART_BM, "the GPU fell off the bus"),
        ((80,), RESTART_APP, "the GPU received corrupted data"),
        ((82, *range(99, 106)), RESTART_APP, "the JPEG engine raised an exception for a program"),
        ((86, 139), RESTART_APP, "the optical flow engine raised an exception for a program"),
        ((92,), _FAILING_MEMORY, "a high number of correctable memory errors"),
        ((93,), IGNORE, "the InfoROM reached its wear limit"),
        ((94,), _CONTAINED, "uncorrectable memory error, contained to one program"),
        ((95,), RESET_GPU, "uncorrectable memory error that was not contained"),
        ((106, 107), _HARMLESS, "a test message from the board's management interface"),
        ((108,), IGNORE, "an NVLink address could not be translated at the other end"),
        ((109,), RESET_GPU, "a context switch took too long"),
        ((110,), RESET_GPU, "security fault"),
        ((119,), RESET_GPU, "the GPU's system processor does not answer"),
        ((120,), RESET_GPU, "the GPU's system processor failed"),
        ((121,), IGNORE, "corrected errors on the link to the CPU"),
        ((136,), RESET_GPU, "an NVLink could not be trained"),
        ((137,), _OF_PROGRAM, "a program made an illegal NVLink access"),
        ((140,), RESET_GPU, "uncorrectable memory error that was not recovered"),
        ((141,), IGNORE, "an error in CUDA's fast path"),
        ((142,), CONTACT_SUPPORT, "the video encoder raised an exception"),
        ((143,), RESET_GPU, "the GPU could not be initialised"),
        ((*range(144, 151),), WORKFLOW_NVLINK5_ERR, "NVLink error"),
        ((151,), RESTART_VM, "a key for confidential computing could not be changed"),
        ((154,), XID_154, "the GPU's recovery action changed"),
        ((155,), RESET_GPU, "an NVLink was taken down by software"),
        ((156,), RESET_GPU, "a damaged part of the GPU was retired"),
        ((157,), IGNORE, "a damaged part of the GPU could not be retired"),
        ((158,), RESET_GPU, "the GPU timed out"),
        ((159,), CHECK_UVM, "an error on the link to the CPU"),
        ((160,), IGNORE, "a memory channel was retired"),
        ((161,), IGNORE, "a memory channel could not be retired"),
        ((162,), _INFORMS, "power smoothing works again"),
        ((163,), _INFORMS, "power smoothing stopped"),
        ((164,), _INFORMS, "the power smoothing circuit is nearly worn out"),
        ((165,), _INFORMS, "the power smoothing circuit is worn out"),
        ((166,), _NONE, "traffic on an NVLink before its encryption was set up"),
        ((167,), _NONE, "a fatal timeout on the PCI bus"),
        ((168,), _NONE, "errors in the protected memory region; the GPU has less memory"),
        ((169,), _NONE, "the GPU's security processor stopped"),
        ((170,), _NONE, "an NVLink interrupt in confidential computing"),
        ((171,), _NONE, "uncorrectable error in the GPU's DRAM; reported together with Xid 48"),
        ((172,), _NONE, "uncorrectable error in the GPU's SRAM; reported together with Xid 48"),
    )
    for number in numbers
}  # fmt: skip

RECOVERY_ACTION_CHANGED: Final = 154


@dataclass(frozen=True, slots=True)
class XidPolicy:
    """Xids that the operator has configured; `fatal` wins."""

    ignored: frozenset[int] = frozenset()
    fatal: frozenset[int] = frozenset()


NO_CHANGES = XidPolicy()


def action_of(number: int) -> Action:
    entry = CATALOG.get(number)
    return _NONE if entry is None else entry.action


def severity_of_xid(number: int, policy: XidPolicy, *, reports_action: bool) -> Severity | None:
    """Return the severity of an Xid; None if it says nothing about the GPU."""
    if number in policy.fatal:
        return Severity.UNHEALTHY
    if number in policy.ignored:
        return None
    severity = action_of(number).severity
    if severity == "undecided":
        return Severity.INFORMATION if reports_action else Severity.DEGRADED
    return severity


def remedy_of_xid(number: int) -> str:
    action = action_of(number)
    return "program-xid" if action.is_program_fault else action.remedy


def xid_text(number: int, severity: Severity) -> str:
    """Return a text such as `Xid 79: the GPU fell off the bus; reboot the node`.

    An Xid that only informs gives no reason for a reset or a reboot.
    """
    entry, action = CATALOG.get(number), action_of(number)
    shows_action = action.advice and (severity > Severity.INFORMATION or not action.ends_work)
    return f"Xid {number}{f': {entry.text}' if entry else ''}{f'; {action.advice}' if shows_action else ''}"
