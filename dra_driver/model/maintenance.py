"""Maintenance claims, which take GPUs out of service."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import StartMaintenance

MaintenanceState = Literal["waiting", "active", "overdue"]

CLOSED_TIMES: Final = "a time from 10s to 24h, such as 90s, 5m or 2h"
"""How long NVML can stay closed."""
MIN_S, MAX_S = 10, 24 * 3600
_DURATION = re.compile(r"([0-9]{1,5})([smh])\Z", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def closed_seconds(text: str) -> int | None:
    """Return the seconds of one of the `CLOSED_TIMES`.

    >>> closed_seconds("15m")
    900
    """
    match = _DURATION.match(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    return seconds if MIN_S <= seconds <= MAX_S else None


@dataclass(frozen=True, slots=True)
class Detachment:
    """The detach file: NVML stays closed until `until_s` of the boot clock.

    `claim` is the maintenance claim that closed NVML, None for `gpu-dra-driver detach`.
    """

    boot_id: str
    until_s: float
    until: str
    claim: ClaimRef | None = None
    gpu_uuids: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        if self.claim is None:
            why = (
                ", so that you can reset GPUs or replace the NVIDIA driver; `gpu-dra-driver detach --end` opens it "
                "again"
            )
        else:
            why = (
                f" for maintenance claim {self.claim.namespace}/{self.claim.name}; NVML opens again when the claim is "
                "released, or after `gpu-dra-driver detach --end`"
            )
        return f"NVML is closed until {self.until}{why}"

    def lasts(self, boot_id: str | None, now_s: float) -> bool:
        """Whether NVML is closed at `now_s` of the boot clock, in boot `boot_id` (None if unknown)."""
        return boot_id in (None, self.boot_id) and now_s < self.until_s


@dataclass(frozen=True, slots=True)
class Maintenance:
    """`waiting`: its GPUs are withdrawn, and it waits until other claims release them and NVML is closed.
    `active`: NVML is closed. `overdue`: NVML has been open again since `until`, but the claim still has its
    GPUs.
    """

    claim: ClaimRef
    gpu_uuids: tuple[str, ...]
    state: MaintenanceState
    until: str | None = None

    @property
    def name(self) -> str:
        return f"{self.claim.namespace}/{self.claim.name}"

    @property
    def text(self) -> str:
        """For example `active until 2026-11-27 20:05:00+00:00`."""
        words = {"waiting": "waiting", "active": "active until", "overdue": "overdue since"}[self.state]
        return words if self.state == "waiting" else f"{words} {self.until or 'an unknown time'}"


def maintenances(
    records: Iterable[ClaimRecord], written: Detachment | None, boot_id: str | None, now_s: float
) -> list[Maintenance]:
    """Return the node's maintenance claims, sorted by namespace and name. `written` is the detach file, even
    if it has expired.
    """
    found = [
        _maintenance(record, step, written, boot_id, now_s)
        for record in records
        if (step := record.maintenance) is not None
    ]
    return sorted(found, key=lambda one: str(one.claim))


def _maintenance(
    record: ClaimRecord, step: StartMaintenance, written: Detachment | None, boot_id: str | None, now_s: float
) -> Maintenance:
    if (record if boot_id is None else record.as_of(boot_id)).phase != "prepared":
        return Maintenance(record.ref, step.gpu_uuids, "waiting")
    own = written if written is not None and written.claim == record.ref else None
    lasts = own is not None and own.lasts(boot_id, now_s)
    return Maintenance(
        record.ref, step.gpu_uuids, "active" if lasts else "overdue", None if own is None else own.until
    )


def overdue_problems(found: Iterable[Maintenance]) -> list[NodeProblem]:
    return [
        NodeProblem(
            "maintenance-overdue",
            f"Maintenance claim {one.name} is {one.text}: NVML is open again, but its GPUs "
            f"({', '.join(one.gpu_uuids)}) stay withdrawn until the claim ends; delete its pod",
            one.name,
            (one.claim,),
        )
        for one in found
        if one.state == "overdue"
    ]
