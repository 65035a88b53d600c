"""One health file of two instances."""

from __future__ import annotations

from pathlib import Path

from dra_driver.health.rules.merge import merged
from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity

GPU = HealthTarget("GPU-1")
MIG = HealthTarget("GPU-1", 7, 0)
XID = Reason("xid", "79", Severity.UNHEALTHY, 10, 10, "Xid 79")
OTHER_XID = Reason("xid", "48", Severity.UNHEALTHY, 20, 20, "Xid 48")
LEVEL = Reason("row-remap", "pending", Severity.DEGRADED, 20, 20, "rows", "poll")


def kept(*reasons: Reason) -> KeptHealth:
    return KeptHealth("boot-1", "580.1", (HealthState(GPU, reasons),))


def test_who_stands_by_writes_nothing_and_takes_over_what_the_other_kept(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    new_turn = False
    old = HealthStore(path, lambda: not new_turn)
    new = HealthStore(path, lambda: new_turn)
    assert not old.is_outdated()
    assert new.load() is None
    assert not new.is_outdated()
    old.save(kept(XID))
    new.save(kept(OTHER_XID))
    assert HealthStore(path).load() == kept(XID)
    new_turn = True
    old.save(kept())
    assert HealthStore(path).load() == kept(XID)
    assert not old.is_outdated()
    assert [new.is_outdated() for _ in range(2)] == [True, False]
    both = kept(OTHER_XID, XID)
    assert new.load() == both
    assert HealthStore(path).load() == both, "kept at once"


def test_what_an_older_boot_kept_or_nobody_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    shared = HealthStore(path, lambda: True)
    shared.save(kept(XID))
    HealthStore(path).save(KeptHealth("boot-0", None, (HealthState(GPU, (OTHER_XID,)),)))
    assert shared.load() == kept(XID)
    path.unlink()
    assert shared.load() == kept(XID)
    assert HealthStore(path).load() == kept(XID), "a file that went away is written again"


def test_merging_adds_events_and_unknown_targets_only() -> None:
    mine = HealthState(GPU, (OTHER_XID,), setbacks=(20,), held_until=None)
    other = HealthState(GPU, (LEVEL, XID), 3, setbacks=(10, 20), held_until=99)
    instance = HealthState(MIG, (XID,), identity="MIG-a")
    assert merged([mine], [other, instance]) == (
        HealthState(GPU, (OTHER_XID, XID), setbacks=(10, 20), held_until=99),
        instance,
    )
    anew = HealthState(MIG, identity="MIG-b")
    assert merged([anew], [instance]) == (anew,)
