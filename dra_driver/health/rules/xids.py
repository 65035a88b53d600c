"""What an Xid number means for new and for running work, as data.

`CATALOG` is NVIDIA's public Xid catalog for Ampere and newer GPUs: what happened, in our words, and what NVIDIA says to
do first. `xids.json` has its rows. Below it stands our policy, which is not NVIDIA's.

NVML's recovery action, which the driver reads after each Xid, decides where the number alone does not: a number that is
not in the catalog, or one whose sub-codes differ. Older NVIDIA drivers tell no recovery action (the catalog links it
from R565 on); then such an Xid keeps new work away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dra_driver.model.health import Severity


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One number of the catalog. `bucket` is the immediate action that it names; empty if it names none yet."""

    bucket: str
    text: str


CATALOG: Mapping[int, CatalogEntry] = {
    number: CatalogEntry(bucket, text)
    for numbers, bucket, text in json.loads(Path(__file__).with_name("xids.json").read_bytes())
    for number in numbers
}

RECOVERY_ACTION_CHANGED = 154
"""Says only that NVML's recovery action is another one, which is read anyway."""

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
"""None: the fault of a program, which says nothing about the GPU. A bucket that is missing leaves it to the recovery
action."""
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
"""Where we differ from the bucket: 92 and 94 are signs of memory that fails, and the GPU needs a reset soon; the others
are tests, a program's faults, or no fault at all."""


@dataclass(frozen=True, slots=True)
class XidPolicy:
    """Xids that the operator wants ignored or taken as fatal besides the known ones; `fatal` wins."""

    ignored: frozenset[int] = frozenset()
    fatal: frozenset[int] = frozenset()


def is_decided(number: int) -> bool:
    """Whether the number alone says how bad the Xid is."""
    entry = CATALOG.get(number)
    return entry is not None and (number in _BY_NUMBER or entry.bucket in _BY_BUCKET)


NO_CHANGES = XidPolicy()


def severity_of_xid(number: int, policy: XidPolicy, *, action_is_told: bool) -> Severity | None:
    """How bad an Xid is; None for one that says nothing about the GPU. `action_is_told` says whether the NVIDIA driver
    tells a recovery action for this GPU."""
    entry = CATALOG.get(number)
    if number in policy.fatal:
        return Severity.UNHEALTHY
    if number in policy.ignored:
        return None
    if entry is None or not is_decided(number):
        return Severity.INFORMATION if action_is_told else Severity.DEGRADED
    return _BY_NUMBER[number] if number in _BY_NUMBER else _BY_BUCKET[entry.bucket]


def xid_text(number: int) -> str:
    """`Xid 79: the GPU fell off the bus`; the number alone where the meaning is unknown."""
    entry = CATALOG.get(number)
    return f"Xid {number}: {entry.text}" if entry else f"Xid {number}"
