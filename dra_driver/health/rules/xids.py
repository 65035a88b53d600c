"""The meaning of each Xid number for new and for running work, as data.

`CATALOG` is NVIDIA's public Xid catalog for Ampere and newer GPUs, reworded: what happened, and what NVIDIA
recommends first. The policy below it is the plugin's, not NVIDIA's.

If the number alone does not decide, because it is not in the catalog or its sub-codes differ, the plugin relies on
NVML's recovery action, which it reads after each Xid. Older NVIDIA drivers report no recovery action (the catalog
mentions it from R565 on); with these drivers, such an Xid keeps new work away.
"""

from __future__ import annotations

from collections.abc import Mapping

from dra_driver.model.dataclass import dataclass
from dra_driver.model.health import Severity


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """An entry of the catalog. `bucket` is its immediate action; empty if it has none yet."""

    bucket: str
    text: str


_ROWS: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((8,), "RESTART_APP", "a program's channel was idle for too long"),
    ((11, 25, 32), "RESTART_APP", "the GPU received commands that are not valid"),
    ((13,), "RESTART_APP", "a program caused a graphics engine exception"),
    ((14,), "IGNORE", "an injected error"),
    ((31,), "RESTART_APP", "a program accessed invalid GPU memory"),
    ((37, 38), "IGNORE", "an error in the NVIDIA driver's firmware"),
    (
        (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
        "RESTART_APP",
        "a copy engine raised an exception for a program",
    ),
    ((43,), "IGNORE", "a program's channel was stopped"),
    ((44,), "IGNORE", "a graphics engine fault during a context switch"),
    ((45,), "WORKFLOW_XID_45", "a program's channel was removed, usually because the program exited"),
    ((46,), "RESET_GPU", "the GPU stopped processing"),
    ((48,), "WORKFLOW_XID_48", "uncorrectable memory error"),
    ((54,), "CHECK_MECHANICALS", "the GPU's auxiliary power is not connected"),
    ((62,), "RESET_GPU", "the GPU's internal microcontroller stopped"),
    ((63,), "IGNORE", "a memory row was remapped or a memory page was retired"),
    ((64,), "RESET_GPU", "a memory row could not be remapped or a memory page could not be retired"),
    ((66, 67), "IGNORE", "the NVIDIA driver made an illegal access"),
    (
        (60, 68, 83, 84, 88, 89, 96, 97, 98),
        "RESTART_APP",
        "the video processor raised an exception for a program",
    ),
    ((69,), "RESTART_APP", "a program used a graphics engine class incorrectly"),
    ((74,), "WORKFLOW_NVLINK_ERR", "NVLink error"),
    ((78,), "UPDATE_SWFW", "a virtual GPU could not be started"),
    ((79,), "RESTART_BM", "the GPU fell off the bus"),
    ((80,), "RESTART_APP", "the GPU received corrupted data"),
    ((82, *range(99, 106)), "RESTART_APP", "the JPEG engine raised an exception for a program"),
    ((86, 139), "RESTART_APP", "the optical flow engine raised an exception for a program"),
    ((92,), "IGNORE", "a high number of correctable memory errors"),
    ((93,), "IGNORE", "the InfoROM reached its wear limit"),
    ((94,), "RESTART_APP", "uncorrectable memory error, contained to one program"),
    ((95,), "RESET_GPU", "uncorrectable memory error that was not contained"),
    ((106, 107), "IGNORE", "a test message from the board's management interface"),
    ((108,), "IGNORE", "an NVLink address could not be translated at the other end"),
    ((109,), "RESET_GPU", "a context switch took too long"),
    ((110,), "RESET_GPU", "security fault"),
    ((119,), "RESET_GPU", "the GPU's system processor does not answer"),
    ((120,), "RESET_GPU", "the GPU's system processor failed"),
    ((121,), "IGNORE", "corrected errors on the link to the CPU"),
    ((136,), "RESET_GPU", "an NVLink could not be trained"),
    ((137,), "IGNORE", "a program made an illegal NVLink access"),
    ((140,), "RESET_GPU", "uncorrectable memory error that was not recovered"),
    ((141,), "IGNORE", "an error in CUDA's fast path"),
    ((142,), "CONTACT_SUPPORT", "the video encoder raised an exception"),
    ((143,), "RESET_GPU", "the GPU could not be initialised"),
    ((*range(144, 151),), "WORKFLOW_NVLINK5_ERR", "NVLink error"),
    ((151,), "RESTART_VM", "a key for confidential computing could not be changed"),
    ((154,), "XID_154", "the GPU's recovery action changed"),
    ((155,), "RESET_GPU", "an NVLink was taken down by software"),
    ((156,), "RESET_GPU", "a damaged part of the GPU was retired"),
    ((157,), "IGNORE", "a damaged part of the GPU could not be retired"),
    ((158,), "RESET_GPU", "the GPU timed out"),
    ((159,), "CHECK_UVM", "an error on the link to the CPU"),
    ((160,), "IGNORE", "a memory channel was retired"),
    ((161,), "IGNORE", "a memory channel could not be retired"),
    ((162,), "", "power smoothing works again"),
    ((163,), "", "power smoothing stopped"),
    ((164,), "", "the power smoothing circuit is nearly worn out"),
    ((165,), "", "the power smoothing circuit is worn out"),
    ((166,), "", "traffic on an NVLink before its encryption was set up"),
    ((167,), "", "a fatal timeout on the PCI bus"),
    ((168,), "", "errors in the protected memory region; the GPU has less memory"),
    ((169,), "", "the GPU's security processor stopped"),
    ((170,), "", "an NVLink interrupt in confidential computing"),
    ((171,), "", "uncorrectable error in the GPU's DRAM; reported together with Xid 48"),
    ((172,), "", "uncorrectable error in the GPU's SRAM; reported together with Xid 48"),
)
CATALOG: Mapping[int, CatalogEntry] = {
    number: CatalogEntry(bucket, text) for numbers, bucket, text in _ROWS for number in numbers
}

RECOVERY_ACTION_CHANGED = 154
"""Means only that NVML's recovery action has changed, which is read anyway."""

# --- our policy ----------------------------------------------------------------------------------

_BY_BUCKET: Mapping[str, Severity | None] = {
    "IGNORE": Severity.INFORMATION,
    "RESTART_APP": None,
    "RESET_GPU": Severity.UNHEALTHY,
    "RESTART_BM": Severity.UNHEALTHY,
    "RESTART_VM": Severity.UNHEALTHY,
    "CHECK_MECHANICALS": Severity.DEGRADED,
    "UPDATE_SWFW": Severity.INFORMATION,
    "WORKFLOW_XID_45": None,
    "WORKFLOW_XID_48": Severity.UNHEALTHY,
    "WORKFLOW_NVLINK_ERR": Severity.UNHEALTHY,
    "XID_154": None,
}
"""None means that the Xid says nothing about the GPU, for example a program's fault. For a bucket that is missing
here, the recovery action decides.
"""
_BY_NUMBER: Mapping[int, Severity | None] = {
    14: None,
    43: None,
    92: Severity.DEGRADED,
    94: Severity.DEGRADED,
    106: None,
    107: None,
    137: None,
    **dict.fromkeys((162, 163, 164, 165), Severity.INFORMATION),
}
"""Exceptions to the buckets: 92 and 94 indicate failing memory, and the GPU needs a reset soon; the others are
tests, program faults, or not faults at all.
"""


_PROGRAM_BUCKETS = frozenset({"RESTART_APP", "WORKFLOW_XID_45"})
_PROGRAM_NUMBERS = frozenset({43, 137})
"""The catalog says to ignore these, because a program caused them."""


@dataclass(frozen=True, slots=True)
class XidPolicy:
    """Xids that the operator has configured as ignored or fatal, in addition to the known ones; `fatal` wins."""

    ignored: frozenset[int] = frozenset()
    fatal: frozenset[int] = frozenset()


def is_decided(number: int) -> bool:
    """Whether the number alone decides the severity."""
    entry = CATALOG.get(number)
    return entry is not None and (number in _BY_NUMBER or entry.bucket in _BY_BUCKET)


def is_program_fault(number: int) -> bool:
    """Whether NVIDIA's catalog attributes the Xid to a program."""
    entry = CATALOG.get(number)
    return entry is not None and (entry.bucket in _PROGRAM_BUCKETS or number in _PROGRAM_NUMBERS)


NO_CHANGES = XidPolicy()


def severity_of_xid(number: int, policy: XidPolicy, *, reports_action: bool) -> Severity | None:
    """Return the severity of an Xid; None if it says nothing about the GPU.

    `reports_action` means that the NVIDIA driver reports a recovery action for this GPU.
    """
    entry = CATALOG.get(number)
    if number in policy.fatal:
        return Severity.UNHEALTHY
    if number in policy.ignored:
        return None
    if entry is None or not is_decided(number):
        return Severity.INFORMATION if reports_action else Severity.DEGRADED
    return _BY_NUMBER[number] if number in _BY_NUMBER else _BY_BUCKET[entry.bucket]


_ENDS_WORK = {
    "RESET_GPU": "reset the GPU",
    "RESTART_BM": "reboot the node",
    "RESTART_VM": "restart the virtual machine",
    "WORKFLOW_XID_48": "reset the GPU",
    "WORKFLOW_NVLINK_ERR": "reset the GPU",
    "WORKFLOW_NVLINK5_ERR": "reset the GPU",
}
_ACTIONS = {
    "RESTART_APP": "restart the program",
    "CHECK_MECHANICALS": "check the power cables of the GPU",
    "UPDATE_SWFW": "update the NVIDIA driver",
    "CONTACT_SUPPORT": "contact NVIDIA",
}


def needs_reboot(number: int) -> bool:
    """Whether NVIDIA's catalog recommends restarting the machine."""
    entry = CATALOG.get(number)
    return entry is not None and entry.bucket in ("RESTART_BM", "RESTART_VM")


def is_mechanical(number: int) -> bool:
    """Whether NVIDIA's catalog recommends a look at cables and connectors."""
    entry = CATALOG.get(number)
    return entry is not None and entry.bucket == "CHECK_MECHANICALS"


def xid_text(number: int, severity: Severity) -> str:
    """Return a text such as `Xid 79: the GPU fell off the bus; reboot the node`.

    The text has no action if the catalog recommends none, and no explanation if the catalog lacks the Xid. An Xid that
    only informs gives no reason for a reset or a reboot.
    """
    entry = CATALOG.get(number)
    actions = _ACTIONS if severity <= Severity.INFORMATION else _ACTIONS | _ENDS_WORK
    action = None if entry is None else actions.get(entry.bucket)
    return f"Xid {number}{f': {entry.text}' if entry else ''}{f'; {action}' if action else ''}"
