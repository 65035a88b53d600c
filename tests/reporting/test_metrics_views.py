"""What each scrape reads from the rest of the driver."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import Counter

from dra_driver.base.threads import run_in_parallel
from dra_driver.errors import StateError
from dra_driver.health.rules.state import observe
from dra_driver.health.rules.taints import MadeInstance
from dra_driver.model.claim import ClaimRef, PodRef
from dra_driver.model.health import HealthState, HealthTarget, InstanceSeen, Severity, Xid
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.model.maintenance import Maintenance
from dra_driver.model.mig import Partitioning, PlacedProfile, Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.metric_views import Views
from dra_driver.reporting.metrics import Metrics
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    NODE,
    ONE_G,
    bound,
    card,
    h100,
    hold,
    inventory,
    mig,
    record,
    uuid,
)
from tests.fakes.scrapes import KnownHealth, by_label, labelled, scraped
from tests.fakes.waiting import PATIENCE_S, eventually

PLACES = (Placement(0, 1), Placement(1, 1))
ON_DEMAND = inventory(
    h100(
        0,
        partitioning=Partitioning((PlacedProfile(ONE_G, PLACES),), tuple((ONE_G, place) for place in PLACES)),
    )
)
FIRST_SLOT = "gpu-00000000-mig-1g10gb-19-0"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(DRIVER, NODE, list)


@pytest.fixture
def health() -> KnownHealth:
    return KnownHealth()


def devices(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """The devices with a count, by type and health."""
    found = by_label(metrics, "nvidia_dra_devices", "device_type", "health")
    assert len(found) == 6 * len({kind for kind, _ in found} | {"gpu", "mig", "possible_mig"})
    return {key: count for key, count in found.items() if count}


def test_claim_is_joined_to_the_uuids_of_its_devices(metrics: Metrics) -> None:
    made = hold(MIG_3G, uuid="", device="made")
    lost = hold(MIG_3G, uuid="", device="not-made")
    twice = replace(hold(GPU_0), share_id="share-1"), replace(hold(GPU_0), share_id="share-2")
    kept = [
        record(*twice, hold(MIG_1G), uid="uid-1"),
        record(made, lost, hold(GPU_1, kind="quantum"), uid="uid-2"),
        record(hold(GPU_1), uid="uid-3", phase="preparing"),
    ]
    metrics.show.claims(lambda: kept, lambda device: "MIG-made" if device == "made" else None, lambda: MIXED)
    found = list(labelled(scraped(metrics), "nvidia_dra_claim_info"))
    common = {"driver": DRIVER, "node": NODE, "namespace": "default"}
    assert all(entry.items() >= common.items() for entry in found)
    assert {entry["pod"] for entry in found} == {""}
    names = ("claim", "claim_uid", "device", "device_type", "uuid", "parent_uuid")
    assert sorted(tuple(entry[name] for name in names) for entry in found) == sorted([
        ("claim-uid-1", "uid-1", GPU_0, "gpu", uuid(0), uuid(0)),
        ("claim-uid-1", "uid-1", MIG_1G, "mig", hold(MIG_1G).uuid, uuid(2)),
        ("claim-uid-2", "uid-2", "made", "mig", "MIG-made", uuid(2)),
        ("claim-uid-2", "uid-2", "not-made", "mig", "", uuid(2)),
        ("claim-uid-2", "uid-2", GPU_1, "unknown", uuid(1), uuid(1)),
    ])  # fmt: skip


def test_claim_has_the_labels_of_the_dcgm_exporter_too(metrics: Metrics) -> None:
    kept = [record(hold(GPU_0), hold(MIG_1G), hold(MIG_3G, uuid="", device="gone"), uid="u")]
    metrics.show.claims(lambda: kept, lambda device: None, lambda: MIXED)
    found = labelled(scraped(metrics), "nvidia_dra_claim_info")
    reported = {
        entry["device"]: {name: value for name, value in entry.items() if name.startswith("dra_")}
        for entry in found
    }
    common = {"dra_claim_namespace": "default", "dra_claim_name": "claim-u", "dra_pool_name": NODE}
    expected = {GPU_0: ("", ""), MIG_1G: ("1g.10gb", hold(MIG_1G).uuid), "gone": ("", "")}
    assert reported == {
        device: {
            **common,
            "dra_device_name": device,
            "dra_mig_profile": profile,
            "dra_mig_device_uuid": mig_uuid,
        }
        for device, (profile, mig_uuid) in expected.items()
    }


def test_claim_is_joined_to_its_pods_and_to_so_many_at_most(metrics: Metrics) -> None:
    def used_by(uid: str, *pods: str) -> ClaimRecord:
        made = record(hold(GPU_0), hold(MIG_1G), uid=uid)
        return replace(
            made, claim=replace(made.claim, pods=tuple(PodRef(pod, f"uid-of-{pod}") for pod in pods))
        )

    many = [f"worker-{number}" for number in range(100)]
    kept = [
        used_by("one", "trainer-0"),
        used_by("shared", *many),
        used_by("idle"),
        used_by("repeated", "b", "a", "b"),
    ]
    metrics.show.claims(lambda: kept, lambda device: None, lambda: None)
    found = list(labelled(scraped(metrics), "nvidia_dra_claim_info"))
    pods = {
        (entry["claim_uid"], device): sorted(
            entry["pod"] for entry in found if (entry["claim_uid"], entry["device"]) == (uid, device)
        )
        for entry in found
        for uid, device in [(entry["claim_uid"], entry["device"])]
    }
    expected = {
        "one": ["trainer-0"], "shared": sorted(many[:16]), "idle": [""], "repeated": ["a", "b"],
    }  # fmt: skip
    assert pods == {(uid, device): names for uid, names in expected.items() for device in (GPU_0, MIG_1G)}


def test_devices_are_counted_by_type_and_by_what_hits_them(metrics: Metrics, health: KnownHealth) -> None:
    metrics.show.devices(lambda: MIXED, health, dict)
    assert devices(metrics) == {("gpu", "ok"): 2, ("mig", "ok"): 2}
    health.has(Severity.UNHEALTHY, "xid", HealthTarget(uuid(2), 7, 0))
    health.has(Severity.DEGRADED, "row-remap", HealthTarget(uuid(0)))
    health.stale = {uuid(1)}
    assert devices(metrics) == {
        ("gpu", "degraded"): 1, ("gpu", "unknown"): 1, ("mig", "unhealthy"): 1, ("mig", "ok"): 1,
    }  # fmt: skip
    health.has(Severity.LOST, "gpu-lost", HealthTarget(uuid(2)))
    assert devices(metrics)["mig", "lost"] == 2


def test_card_that_a_virtual_machine_has_is_healthy_though_it_is_not_checked(
    metrics: Metrics, health: KnownHealth
) -> None:
    metrics.show.devices(lambda: inventory(h100(0), cards=(card(0), bound(1))), health, dict)
    health.stale = {uuid(0), uuid(1)}
    assert devices(metrics) == {("gpu", "unknown"): 1, ("vfio", "unknown"): 1, ("vfio", "ok"): 1}


def test_devices_made_on_demand_have_the_health_of_their_instance(
    metrics: Metrics, health: KnownHealth
) -> None:
    made: dict[str, MadeInstance] = {}
    metrics.show.devices(lambda: ON_DEMAND, health, lambda: made)
    health.has(Severity.UNHEALTHY, "xid", HealthTarget(uuid(0), 3))
    assert devices(metrics) == {("gpu", "ok"): 1, ("possible_mig", "ok"): 2}
    made[FIRST_SLOT] = MadeInstance(3, 0, "MIG-a")
    assert devices(metrics) == {("gpu", "ok"): 1, ("possible_mig", "ok"): 1, ("possible_mig", "unhealthy"): 1}


@pytest.mark.parametrize(
    ("found", "counts"), [(None, {}), (Inventory(), {}), (MIXED, {("gpu", "unknown"): 2})]
)
def test_without_a_recent_poll_no_one_is_called_well(
    metrics: Metrics, health: KnownHealth, found: Any, counts: dict[Any, int]
) -> None:
    health.stale = {uuid(n) for n in range(3)}
    metrics.show.devices(lambda: found, health, dict)
    assert {key: count for key, count in devices(metrics).items() if key[0] == "gpu"} == counts


def test_health_of_each_gpu_is_reported_by_severity_reason_and_xid(
    metrics: Metrics, health: KnownHealth
) -> None:
    metrics.show.health(lambda: MIXED, health)
    assert by_label(metrics, "nvidia_dra_gpu_severity", "uuid") == {(uuid(n),): 0 for n in range(3)}
    health.has(Severity.UNHEALTHY, "xid", HealthTarget(uuid(0)))
    health.has(Severity.INFORMATION, "unmonitored", HealthTarget(uuid(0)))
    health.has(Severity.DEGRADED, "xid", HealthTarget(uuid(2), 7))
    health.has(Severity.LOST, "gpu-lost", HealthTarget(uuid(5)))  # discovery no longer lists it
    health.has(Severity.DEGRADED, "xid", HealthTarget(uuid(6)))  # taken out by hand
    health.xids = {(uuid(0), 79): 1, (uuid(2), 94): 3}
    assert by_label(metrics, "nvidia_dra_gpu_severity", "uuid") == {
        (uuid(0),): 3, (uuid(1),): 0, (uuid(2),): 0, (uuid(5),): 4,
    }  # fmt: skip
    assert by_label(metrics, "nvidia_dra_gpu_reason", "uuid", "reason") == {
        (uuid(0), "xid"): 3, (uuid(0), "unmonitored"): 1, (uuid(2), "xid"): 2, (uuid(5), "gpu-lost"): 4,
    }  # fmt: skip
    assert by_label(metrics, "nvidia_dra_gpu_xids_total", "uuid", "xid") == {
        (uuid(0), "79"): 1,
        (uuid(2), "94"): 3,
    }


def test_an_unresponsive_gpu_is_reported_even_while_every_check_of_it_hangs(
    metrics: Metrics, health: KnownHealth
) -> None:
    metrics.show.health(lambda: MIXED, health)
    health.stale = {uuid(1)}
    monitored = by_label(metrics, "nvidia_dra_gpu_monitored", "uuid")
    assert monitored == {(uuid(0),): 1, (uuid(1),): 0, (uuid(2),): 1}
    health.stale = {uuid(n) for n in range(3)}
    health.has(Severity.DEGRADED, "unresponsive", HealthTarget(uuid(1)))
    health.has(Severity.UNHEALTHY, "xid", HealthTarget(uuid(2)))
    assert by_label(metrics, "nvidia_dra_gpu_severity", "uuid") == {(uuid(1),): 2}
    assert by_label(metrics, "nvidia_dra_gpu_reason", "uuid", "reason") == {(uuid(1), "unresponsive"): 2}


def test_trouble_of_an_instance_alone_is_reported_for_its_mig_devices(
    metrics: Metrics, health: KnownHealth
) -> None:
    metrics.show.health(lambda: MIXED, health)
    labels = ("parent_uuid", "uuid", "mig_instance")
    assert by_label(metrics, "nvidia_dra_mig_severity", *labels) == {}
    for target, identity in (
        (HealthTarget(uuid(2), 7, 0), "MIG-a"),
        (HealthTarget(uuid(2), 9), "MIG-b,MIG-c"),
        (HealthTarget(uuid(2), 11, 0), None),  # no check yet; an empty label would equal a missing one
    ):
        state = HealthState(target)
        if identity:
            state = observe(state, InstanceSeen(identity), 1)
        health.known[target] = observe(state, Xid(95 if target.gpu_instance_id == 7 else 94), 1)
    assert by_label(metrics, "nvidia_dra_mig_severity", *labels) == {
        (uuid(2), "MIG-a", "7/0"): 3, (uuid(2), "MIG-b", "9"): 2, (uuid(2), "MIG-c", "9"): 2,
        (uuid(2), "unknown", "11/0"): 2,
    }  # fmt: skip
    assert by_label(metrics, "nvidia_dra_gpu_severity", "uuid")[uuid(2),] == 0, "the rest of the GPU is well"
    assert by_label(metrics, "nvidia_dra_gpu_reason", "uuid", "reason") == {(uuid(2), "xid"): 3}
    health.stale = {uuid(2)}
    assert by_label(metrics, "nvidia_dra_mig_severity", *labels) == {}


def test_inventory_reports_versions_faults_and_mig_devices_by_profile(metrics: Metrics) -> None:
    shown: list[Inventory | None] = [None]
    metrics.show.inventory(lambda: shown[0])
    info = ("version", "cuda")
    assert by_label(metrics, "nvidia_dra_gpu_driver_info", *info) == {("", ""): 1}
    two = replace(MIXED.gpus[2], mig_devices=(*MIXED.gpus[2].mig_devices, mig(2, ONE_G, 1, 1, 8)))
    shown[0] = replace(MIXED, gpus=(*MIXED.gpus[:2], two), faults=(DiscoveryFault("gpu 0", "x"),))
    assert by_label(metrics, "nvidia_dra_gpu_driver_info", *info) == {("570.124.06", "12.8"): 1}
    assert by_label(metrics, "nvidia_dra_discovery_faults", "driver") == {(DRIVER,): 1}
    found = by_label(metrics, "nvidia_dra_mig_devices", "uuid", "profile")
    assert found == {(uuid(2), "1g.10gb"): 2, (uuid(2), "3g.40gb"): 1}


def test_gpus_in_maintenance_are_counted_by_claim_and_state(metrics: Metrics) -> None:
    found = [
        Maintenance(ClaimRef("ops", "a", "uid-a"), (uuid(0), uuid(1)), "overdue"),
        Maintenance(ClaimRef("ops", "b", "uid-b"), (uuid(2),), "waiting"),
    ]
    metrics.show.maintenances(lambda: found)
    assert by_label(metrics, "nvidia_dra_maintenance_gpus", "claim_namespace", "claim_name", "state") == {
        ("ops", "a", "waiting"): 0, ("ops", "a", "active"): 0, ("ops", "a", "overdue"): 2,
        ("ops", "b", "waiting"): 1, ("ops", "b", "active"): 0, ("ops", "b", "overdue"): 0,
    }  # fmt: skip


def test_single_values_follow_what_they_are_read_from(metrics: Metrics) -> None:
    problems: list[str] = []
    reported = {"written": 0, "dropped": 0, "failed": 0}
    metrics.show.value("readiness", "ready", lambda: not problems)
    metrics.show.value("problem", "node_problem", lambda: bool(problems))
    metrics.show.publishing(lambda: problems[0] if problems else None, lambda: 3, lambda: 2)
    metrics.show.value("partitions", "partitions_unsupported", lambda: bool(problems))
    metrics.show.reports(lambda: reported)
    metrics.show.mps(lambda: ["ready", "ready", *("fault" for _ in problems)])

    def values() -> list[float]:
        names = (
            "ready", "node_problem", "publish_problem", "published_slices", "partitions_unsupported",
        )  # fmt: skip
        return [by_label(metrics, f"nvidia_dra_{name}", "driver")[DRIVER,] for name in names]

    assert values() == [1, 0, 0, 3, 0]
    problems.append("a problem")
    assert values() == [0, 1, 1, 3, 1]
    reported.update(written=1, dropped=2, failed=3)
    outcomes = by_label(metrics, "nvidia_dra_notices_total", "outcome")
    assert outcomes == {("written",): 1, ("dropped",): 2, ("failed",): 3}
    states = by_label(metrics, "nvidia_dra_mps_daemons", "state")
    assert states == {("starting",): 0, ("ready",): 2, ("fault",): 1, ("stopped",): 0, ("failed",): 0}


def test_source_that_fails_costs_its_own_metrics_only_and_is_counted(metrics: Metrics) -> None:
    error: list[Exception] = []

    def failing() -> int:
        raise error[0]

    def kept() -> list[Any]:
        yield record(hold(GPU_0))
        raise StateError("the disk is gone")

    metrics.show.value("failing", "claims_failing", failing)
    metrics.show.claims(kept, lambda device: None, lambda: None)
    metrics.show.value("readiness", "ready", lambda: True)
    causes = ("source", "cause")
    for times, raised in enumerate((StateError("x"), ValueError("a surprise")), start=1):
        error[:] = [raised]
        found = scraped(metrics)
        names = {name for name, _ in found}
        assert names >= {"nvidia_dra_ready", "nvidia_dra_prepared_devices", "nvidia_dra_requests_total"}
        assert not names & {"nvidia_dra_claims_failing", "nvidia_dra_claim_info"}
        name = "nvidia_dra_scrape_errors_total"
        counted = {
            (labels["source"], labels["cause"]): found[name, tuple(sorted(labels.items()))]
            for labels in labelled(found, name)
        }
        assert counted["failing", "error"] == counted["claims", "error"] == times
    counted = by_label(metrics, "nvidia_dra_scrape_errors_total", *causes)
    assert counted["readiness", "error"] == counted["claims", "timeout"] == 0


def errors() -> Counter:
    return Counter("nvidia_dra_scrape_errors", "", ("driver", "source", "cause"), registry=None)


def test_source_that_hangs_is_left_out_asked_once_and_reported_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, requested, failed = threading.Event(), [], errors()
    views = Views(DRIVER, NODE, failed, within_s=0.2)

    def failures() -> dict[tuple[str, str], float]:
        samples = [one for family in failed.collect() for one in family.samples if one.value]
        return {(one.labels["source"], one.labels["cause"]): one.value for one in samples}

    def states() -> list[str]:
        requested.append("states")
        release.wait(PATIENCE_S)
        return ["ready"]

    views.mps(states)
    views.value("readiness", "ready", lambda: True)
    answering = views._calls["readiness"]
    start = answering.start

    def answered() -> None:
        """The time of a scrape begins when this source has answered."""
        start()
        eventually(lambda: not answering.is_running)

    monkeypatch.setattr(answering, "start", answered)
    for times in (1, 2, 3):
        assert [family.name for family in views.collect()] == ["nvidia_dra_ready"]
        assert failures() == {("mps", "timeout"): times}
    assert eventually(lambda: requested) == ["states"]
    release.set()
    patient = Views(DRIVER, NODE, failed, within_s=PATIENCE_S)
    patient.mps(states)
    assert [family.name for family in patient.collect()] == ["nvidia_dra_mps_daemons"]
    assert failures() == {("mps", "timeout"): 3}


def test_scrapes_at_the_same_time_are_all_answered() -> None:
    views = Views(DRIVER, NODE, errors(), within_s=PATIENCE_S)
    views.mps(lambda: ["ready"])
    answers = run_in_parallel([lambda: [family.name for family in views.collect()]] * 3, 3)
    assert [answer.result() for answer in answers] == [["nvidia_dra_mps_daemons"]] * 3
