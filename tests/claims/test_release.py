from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dra_driver.cdi.rules.spec import SpecDevice
from dra_driver.claims.rules.holders import release_reason, staleness
from dra_driver.claims.rules.plan import lost_claim
from dra_driver.model.claim import AllocatedClaim, ClaimNow
from dra_driver.model.record import ClaimRecord
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIXED, NODE, hold, record, ref

HELD = record(hold(GPU_0), uid="uid-1")
BOTH = record(hold(GPU_0), hold(GPU_1), uid="uid-1")


def now(*devices: str, **changes: object) -> ClaimNow:
    return replace(
        ClaimNow("uid-1", False, True, frozenset((DRIVER, NODE, device) for device in devices)), **changes
    )


GONE = "was deleted"
REMADE = "was deleted and created again"
FREE = "is no longer allocated"
MOVED = "now has another device"
OTHERS = "now has other devices"


@pytest.mark.parametrize(
    ("held", "seen", "leaving", "stale"),
    [
        (HELD, None, GONE, GONE),
        (HELD, now(GPU_0, uid="uid-2"), REMADE, REMADE),
        (HELD, now(GPU_0, uid="uid-2", allocated=None), REMADE, REMADE),
        (HELD, now(allocated=None), FREE, FREE),
        (HELD, now(allocated=None, is_deleting=True), FREE, FREE),
        (HELD, now(), MOVED, OTHERS),
        (HELD, now(GPU_1), MOVED, OTHERS),
        (HELD, now(allocated=frozenset({("other.example.com", NODE, GPU_0)})), MOVED, OTHERS),
        (HELD, now(allocated=frozenset({(DRIVER, "node-b", GPU_0)})), MOVED, OTHERS),
        (BOTH, now(GPU_1), MOVED, None),
        (BOTH, now(GPU_0), None, None),
        (HELD, now(GPU_0, is_deleting=True), "is being deleted", None),
        (HELD, now(GPU_0, is_reserved=False), "is no longer used by a pod", None),
        (HELD, now(GPU_0), None, None),
        (HELD, now(GPU_0, GPU_1), None, None),
        (replace(HELD, phase="preparing"), None, GONE, GONE),
        (lost_claim("uid-1", [SpecDevice(GPU_0)], MIXED), None, None, None),
        (ClaimRecord(AllocatedClaim(ref(), ()), "prepared", "", (hold(GPU_0),), ()), now(), None, None),
    ],
)
def test_api_server_decides_whether_a_claim_is_leaving(
    held: ClaimRecord, seen: ClaimNow | None, leaving: str | None, stale: str | None
) -> None:
    assert release_reason(held, seen, DRIVER, GPU_0) == leaving
    assert staleness(held, seen, DRIVER) == stale


def test_stale_claims_are_always_leaving_too() -> None:
    """Otherwise a Prepare would be refused because of a holder that is about to be unprepared."""
    allocations = (None, (), (GPU_0,), (GPU_1,), (GPU_0, GPU_1))
    for uid, deleting, reserved, devices in product(
        ("uid-1", "uid-2"), (False, True), (False, True), allocations
    ):
        seen = now(*devices or (), uid=uid, is_deleting=deleting, is_reserved=reserved)
        seen = replace(seen, allocated=None) if devices is None else seen
        for held in (HELD, BOTH):
            if staleness(held, seen, DRIVER) is not None:
                assert all(release_reason(held, seen, DRIVER, device.device) for device in held.devices)
