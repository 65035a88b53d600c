"""How each reason ends. Nothing else ends it: not time, not a query that failed, and not a poll that heard nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from dra_driver.health.rules.nvlinks import NVLINK, NVLINK_ERRORS
from dra_driver.health.rules.polling import (
    BANK_REMAP,
    CONFIDENTIAL,
    FABRIC,
    MEMORY,
    PAGE_RETIREMENT,
    PCIE_GENERATION,
    PCIE_WIDTH,
    RECOVERY_ACTION,
    REPAIR,
    ROW_REMAP,
    SLOWDOWN,
    SRAM,
)
from dra_driver.health.rules.xids import is_program_fault
from dra_driver.model.health import LOST, UNMONITORED, UNRESPONSIVE, Reason, Severity

XID = "xid"
ECC = "ecc"
FLAPPING = "flapping"


class Ending(Enum):
    """What ends a reason."""

    GOOD_VALUE = "the query that found it reads a good value"
    ANSWER = "a live query of the GPU succeeds"
    RESET = "the GPU was reset, or NVML reports the recovery action NONE; the memory waits for no repair"
    STILL = "as RESET, and the count of errors stayed still since"
    TIME = "time passes without another such event, and NVML requests no action"
    OURS = "what gpu-dra-driver itself could not do, or did, is over"


_BY_KEY: Mapping[str, Ending] = {
    BANK_REMAP: Ending.GOOD_VALUE,
    CONFIDENTIAL: Ending.GOOD_VALUE,
    ECC: Ending.STILL,
    FABRIC: Ending.GOOD_VALUE,
    FLAPPING: Ending.OURS,
    LOST: Ending.ANSWER,
    MEMORY: Ending.GOOD_VALUE,
    NVLINK: Ending.GOOD_VALUE,
    NVLINK_ERRORS: Ending.GOOD_VALUE,
    PAGE_RETIREMENT: Ending.GOOD_VALUE,
    PCIE_GENERATION: Ending.GOOD_VALUE,
    PCIE_WIDTH: Ending.GOOD_VALUE,
    RECOVERY_ACTION: Ending.GOOD_VALUE,
    REPAIR: Ending.GOOD_VALUE,
    ROW_REMAP: Ending.GOOD_VALUE,
    SLOWDOWN: Ending.GOOD_VALUE,
    SRAM: Ending.GOOD_VALUE,
    UNMONITORED: Ending.OURS,
}


def ending_of(reason: Reason) -> Ending:
    """How the reason ends. Of Xids, time ends those that NVIDIA's catalog attributes to a program, and those that are
    mere information."""
    if reason.key == UNRESPONSIVE:
        return Ending.ANSWER if reason.value else Ending.OURS
    if reason.key == XID:
        is_mild = reason.severity <= Severity.INFORMATION or is_program_fault(int(reason.value))
        return Ending.TIME if is_mild else Ending.RESET
    return _BY_KEY[reason.key]


def waits_for_reset(reason: Reason) -> bool:
    """Whether the observation of a reset ends the reason, and none has been observed yet."""
    return ending_of(reason) in (Ending.RESET, Ending.STILL) and not reason.reset_seen
