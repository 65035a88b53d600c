"""An unreadable record: the claim's CDI spec shows what the claim held, and nothing else is blocked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dra_driver.cdi.rules.spec import SpecDevice, devices_of
from dra_driver.model.claim import AllocatedClaim, Prepared
from dra_driver.model.steps import RunMps
from tests.fakes.kindnode import KINDS, KindNode, Site, share
from tests.fakes.preparing import error_of
from tests.fakes.samples import claim, result
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually


@pytest.fixture
def node(site: Site, memory_path: Path) -> KindNode:
    site.reset()
    return KindNode(site, memory_path / "node")


def lost(node: KindNode, wanted: AllocatedClaim) -> None:
    assert isinstance(node.prepare(wanted), Prepared)
    (node.records.directory / f"{wanted.ref.uid}.json").write_text("{")
    node.records.load()


def test_monitor_blocks_none_of_the_gpus_that_it_checks(node: KindNode, site: Site) -> None:
    names = [site.whole(index) for index in (2, 3)]
    monitor = claim(*(result(name, admin_access=True) for name in names), uid="monitor")
    lost(node, monitor)
    for number, name in enumerate(names):
        assert isinstance(node.prepare(claim(name, uid=f"user-{number}")), Prepared)
    assert isinstance(node.prepare(monitor), Prepared)


def test_gpu_in_maintenance_gets_no_claim(node: KindNode, site: Site) -> None:
    wanted = KINDS["maintenance"].wanted(site)
    lost(node, wanted)
    assert "is in maintenance for claim ?/? (UID uid-1)" in error_of(
        node.prepare(claim(wanted.results[0].device, uid="user"))
    )
    assert node.unprepare(wanted) is None
    assert isinstance(node.prepare(claim(wanted.results[0].device, uid="user")), Prepared)


def test_claim_that_uses_a_gpu_and_observes_it_too_keeps_it(node: KindNode, site: Site) -> None:
    name = site.whole(2)
    lost(node, claim(result(name, "use"), result(name, "look", admin_access=True), uid="both"))
    assert "is held by claim ?/? (UID both)" in error_of(node.prepare(claim(name, uid="user")))


def test_share_blocks_no_other_share_of_its_device(node: KindNode, site: Site) -> None:
    lost(node, claim(share(site, 0), uid="share-0"))
    assert isinstance(node.prepare(claim(share(site, 1), uid="share-1")), Prepared)
    assert "is held by claim ?/? (UID share-0)" in error_of(
        node.prepare(claim(share(site, 0), uid="same-share"))
    )
    assert "is held by claim" in error_of(node.prepare(claim(site.whole(5), uid="whole")))


@pytest.mark.parametrize("hangs", [False, True])
def test_mps_daemon_of_a_claim_without_record_is_stopped_in_its_lane_and_without_the_claims_lock(
    node: KindNode, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("dra_driver.journal.executor._UNDO_WAIT_S", 0.5 if hangs else PATIENCE_S)
    wanted = KINDS["MPS settings"].wanted(node.site)
    lost(node, wanted)
    uid, begun, let = wanted.ref.uid, threading.Event(), threading.Event()
    runner = node.runner.runners[RunMps]
    real = runner.undo

    def undo(*given: Any) -> None:
        with node.records.locks.hold(uid, 0.0):
            assert node.lanes.under_way().keys() == {node.site.gpu(3).uuid}
        begun.set()
        assert not hangs or let.wait(PATIENCE_S)
        real(*given)

    monkeypatch.setattr(runner, "undo", undo)
    assert node.unprepare(wanted) is None
    assert begun.wait(PATIENCE_S)
    assert uid not in node.specs.list()
    assert [one.name for one in node.cleaner.outstanding()] == [uid] * hangs
    let.set()
    eventually(lambda: not node.lanes.under_way())
    assert node.unprepare(wanted) is None
    assert uid not in node.specs.list()
    assert not node.mps.daemons()


@tabled("spec")
def test_spec_that_says_less_than_it_should_is_read_as_far_as_it_goes(spec: Any) -> None:
    assert devices_of("u", spec) in ((), (SpecDevice("gpu-0"),))
