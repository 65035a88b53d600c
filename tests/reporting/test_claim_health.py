"""Who is notified of a GPU's health, and whose status is checked again when."""

from __future__ import annotations

import pytest

from dra_driver.model.health import HealthChange, HealthTarget, Severity
from dra_driver.reporting.claim_status import ClaimHealthReporter
from tests.fakes.samples import GPU_0, MIG_1G, MIG_3G, MIXED, hold, record, uuid
from tests.fakes.tables import tabled

RECORDS = {
    uid: record(hold(name), uid=uid) for uid, name in (("whole", GPU_0), ("one", MIG_1G), ("three", MIG_3G))
}


class Bench:
    def __init__(self) -> None:
        self.dropped = 0
        self.reported: list[str] = []
        self.renewed: list[str] = []
        self.records = dict(RECORDS)
        self.inventory = MIXED
        self.now = 100.0
        self.news = ClaimHealthReporter(
            self,
            self,
            lambda: self.records,
            lambda: self.inventory,
            lambda device: None,
            clock=lambda: self.now,
        )

    def claim_event(self, ref, reason, message, *, warning):
        self.reported.append(ref.uid)

    def node_event(self, reason, message, *, warning):
        self.reported.append("node")

    def renew(self, uid):
        self.renewed.append(uid)

    def change(self, *target):
        self.news.health_changed(
            HealthChange(HealthTarget(*target), 1, Severity.OK, Severity.UNHEALTHY, "bad")
        )

    def looked(self):
        self.renewed = []
        self.news.renew_statuses()
        return self.renewed


@pytest.fixture
def bench():
    return Bench()


@tabled("target", "reported")
def test_only_holders_of_affected_devices_are_reported(bench, target, reported):
    gpu, *instances = target
    bench.change(uuid(gpu), *instances)
    assert bench.reported == reported


def test_every_status_is_checked_after_the_start(bench):
    bench.inventory = None
    assert bench.looked() == []
    bench.inventory = MIXED
    everything = list(RECORDS)
    assert bench.looked() == everything
    assert bench.looked() == []


def test_a_change_concerns_the_holders_of_the_gpu(bench):
    bench.looked()
    bench.change(uuid(2), 7, 0)
    assert bench.looked() == ["one", "three"]
    assert bench.looked() == []


def test_lost_reports_are_sent_again_at_a_limited_rate(bench):
    bench.looked()
    bench.dropped = 1
    assert bench.looked() == list(RECORDS)
    bench.now, bench.dropped = 110.0, 2
    assert bench.looked() == []
    bench.now = 161.0
    assert bench.looked() == list(RECORDS)


def test_many_claims_are_spread_over_rounds(bench):
    bench.records = {f"uid-{n:03}": record(hold(GPU_0), uid=f"uid-{n:03}") for n in range(60)}
    rounds = [bench.looked() for _ in range(7)]
    assert [len(found) for found in rounds] == [10] * 6 + [0]
    assert sorted(uid for found in rounds for uid in found) == list(bench.records)
