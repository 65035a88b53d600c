"""The state of a maintenance claim, from its record and the detach file."""

from __future__ import annotations

import pytest

from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.maintenance import Detachment, Maintenance, closed_seconds, maintenances
from dra_driver.model.record import ClaimRecord, Phase
from dra_driver.model.steps import StartMaintenance
from tests.fakes.tables import tabled

REF, OTHER = ClaimRef("ops", "reset", "uid-1"), ClaimRef("ops", "flash", "uid-2")
UNTIL = "2026-11-27 20:05:00+00:00"


def record(phase: Phase, ref: ClaimRef = REF, boot_id: str = "boot") -> ClaimRecord:
    step = StartMaintenance(("GPU-1", "GPU-2"), "Wait", 900)
    return ClaimRecord(AllocatedClaim(ref, (), ()), phase, boot_id, (), (step,))


def written(claim: ClaimRef | None, until_s: float = 900.0, boot_id: str = "boot") -> Detachment:
    return Detachment(boot_id, until_s, UNTIL, claim)


@pytest.mark.parametrize(
    ("found", "file", "state", "until"),
    [
        (record("preparing"), None, "waiting", None),
        (record("preparing"), written(REF), "waiting", None),
        (record("preparing"), written(OTHER), "waiting", None),
        (record("prepared"), written(REF), "active", UNTIL),
        (record("prepared"), written(REF, until_s=100.0), "overdue", UNTIL),
        (record("prepared"), written(OTHER), "overdue", None),
        (record("prepared"), written(None), "overdue", None),
        (record("prepared"), None, "overdue", None),
        (record("prepared", boot_id="older"), written(REF, boot_id="older"), "waiting", None),
        (record("prepared"), written(REF, boot_id="older"), "overdue", UNTIL),
    ],
)
def test_maintenance_claim_has_the_state_of_its_record_and_file(
    found: ClaimRecord, file: Detachment | None, state: str, until: str | None
) -> None:
    [one] = maintenances([found], file, "boot", now_s=100.0)
    assert (one.claim, one.gpu_uuids, one.state, one.until) == (REF, ("GPU-1", "GPU-2"), state, until)


def test_maintenances_are_sorted_and_leave_other_claims_out() -> None:
    plain = ClaimRecord(AllocatedClaim(ClaimRef("ops", "a", "uid-3"), (), ()), "prepared", "boot", (), ())
    found = maintenances([record("prepared"), plain, record("preparing", OTHER)], written(REF), "boot", 0.0)
    gpus = ("GPU-1", "GPU-2")
    assert found == [Maintenance(OTHER, gpus, "waiting"), Maintenance(REF, gpus, "active", UNTIL)]


@tabled("text", "seconds")
def test_time_has_seconds_or_is_refused(text: str, seconds: int | None) -> None:
    assert closed_seconds(text) == seconds
