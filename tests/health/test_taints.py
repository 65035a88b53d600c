"""Taints from health, for each kind of device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playground.apiserver.rules import is_label_key, is_label_value

from dra_driver.health.rules.state import observe
from dra_driver.health.rules.taints import (
    PREFIX,
    MadeInstance,
    TaintPolicy,
    device_reasons,
    device_taints,
    instances_by_device,
    is_withdrawn,
    rfc3339,
    taints_of,
)
from dra_driver.model.gpu import UnreadyFabric
from dra_driver.model.health import (
    TAINTED_KEYS,
    HealthState,
    HealthStates,
    HealthTarget,
    InstanceSeen,
    MonitoringState,
    Observation,
    PolledHealth,
    PollResult,
    Reason,
    Severity,
    Unreachable,
    Xid,
)
from dra_driver.model.inventory import DynamicMigDevice
from dra_driver.model.mig import OwnedInstance, Partitioning, Placement
from dra_driver.slices.rules.build import MAX_TAINTS, OLDEST_TAINTS
from tests.fakes.samples import (
    GPU_0,
    MIG_1G,
    MIG_3G,
    MIXED,
    ONE_G,
    VFIO_0,
    bound,
    card,
    h100,
    inventory,
    uuid,
)

NOW = 1_800_000_000
TIME = "2027-01-15T08:00:00Z"
WHOLE, SMALL, LARGE = (MIXED.by_name[name] for name in (GPU_0, MIG_1G, MIG_3G))
ON_DEMAND = DynamicMigDevice("gpu-00000003-mig-1g10gb-19-2", h100(3), ONE_G, Placement(2, 1))

CUT = replace(h100(3), partitioning=Partitioning((), ((ONE_G, Placement(2, 1)),)))
COUNTED = replace(ON_DEMAND, gpu=CUT)


def states(*entries: tuple[HealthTarget, Observation]) -> HealthStates:
    found: dict[HealthTarget, HealthState] = {}
    for target, observation in entries:
        found[target] = observe(found.get(target, HealthState(target)), observation, NOW)
    return found


def made(gi: int, uuid: str | None = "MIG-new") -> dict[str, MadeInstance]:
    return {ON_DEMAND.name: MadeInstance(gi, 0, uuid)}


def taint(key, value=None, effect="NoSchedule"):
    return {"key": PREFIX + key, **({"value": value} if value else {}), "effect": effect, "timeAdded": TIME}


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (Xid(79), [taint("xid", "79")]),
        (Xid(777), [taint("xid", "777", "None")]),
        (Xid(31), []),
        (Unreachable(), [taint("gpu-lost")]),
        (MonitoringState("no events"), [taint("unmonitored", effect="None")]),
        (PollResult(PolledHealth(recovery_action=1)), [taint("recovery-action", "reset")]),
        (PollResult(PolledHealth(remap_pending=True, remap_failed=True)), [taint("row-remap", "failure")]),
        (PollResult(PolledHealth(fabric="broken")), [taint("fabric", "broken")]),
        (PollResult(PolledHealth(accepts_work=False)), [taint("confidential-compute", "not-ready")]),
        (PollResult(PolledHealth(slowdowns=frozenset({"thermal", "power"}))), []),
    ],
)
def test_keys_values_and_effects(observation, expected):
    found = states((HealthTarget(WHOLE.uuid), observation))
    assert list(device_taints(WHOLE, found, {})) == expected
    assert device_taints(WHOLE, {}, {}) == ()


def test_card_has_the_health_of_its_gpu_until_it_cannot_be_checked():
    found = states((HealthTarget(uuid(0)), Xid(79)))
    fabric = UnreadyFabric("pending", "in progress", NOW)
    free = inventory(h100(0, unready_fabric=fabric), cards=(card(0),)).by_name[VFIO_0]
    whole = inventory(h100(0, unready_fabric=fabric)).by_name[GPU_0]
    assert device_taints(free, found, {}) == device_taints(whole, found, {})
    assert [entry["key"] for entry in device_taints(free, found, {})] == [PREFIX + "fabric", PREFIX + "xid"]
    assert device_taints(inventory(cards=(bound(0),)).by_name[VFIO_0], found, {}) == ()


def test_reasons_of_a_gpu_hit_all_its_devices_and_those_of_an_instance_only_it():
    parent = SMALL.gpu.uuid
    found = states(
        (HealthTarget(parent), Xid(94)),
        (HealthTarget(parent, 7, 0), Xid(95)),
        (HealthTarget(uuid(3), 9, 0), Xid(48)),
    )
    assert [item["value"] for item in device_taints(SMALL, found, {})] == ["95"]
    assert [item["value"] for item in device_taints(LARGE, found, {})] == ["94"]
    assert device_taints(WHOLE, found, {}) == ()
    assert device_taints(ON_DEMAND, found, {}) == ()
    assert [item["value"] for item in device_taints(ON_DEMAND, found, made(9))] == ["48"]
    assert device_taints(ON_DEMAND, found, made(8)) == ()
    whole_instance = states((HealthTarget(parent, 7), Xid(95)))
    assert [item["value"] for item in device_taints(SMALL, whole_instance, {})] == ["95"]
    assert device_taints(LARGE, whole_instance, {}) == ()


def test_a_fabric_that_was_not_ready_when_the_device_was_read_is_a_taint_whatever_polls_say():
    def read(unready: UnreadyFabric | None, device: Any = WHOLE) -> Any:
        return replace(device, gpu=replace(device.gpu, unready_fabric=unready))

    pending = UnreadyFabric("pending", "the registration is in progress", NOW)
    polled = states((HealthTarget(WHOLE.uuid), PollResult(PolledHealth(fabric="ready"))))
    for found in ({}, polled):
        assert list(device_taints(read(pending), found, {})) == [taint("fabric", "pending")]
    broken = UnreadyFabric("broken", "the registration failed with NVML error 999", NOW)
    assert list(device_taints(read(broken), polled, {})) == [taint("fabric", "broken")]
    for device in (read(None), read(UnreadyFabric("unknown", "Unknown Error", NOW)), read(pending, SMALL)):
        assert device_taints(device, polled, {}) == ()


def test_the_first_of_discovery_and_poll_to_find_a_fabric_unready_reports_the_time_of_its_taint():
    polled = states((HealthTarget(WHOLE.uuid), PollResult(PolledHealth(fabric="pending"))))
    for since, shown in ((NOW - 1, NOW - 1), (NOW + 1, NOW)):
        gpu = replace(WHOLE.gpu, unready_fabric=UnreadyFabric("pending", "", since))
        [found] = device_taints(replace(WHOLE, gpu=gpu), polled, {})
        assert found == taint("fabric", "pending") | {"timeAdded": rfc3339(shown)}


def test_the_ledger_reports_which_instance_a_device_is():
    def owned(device: str, gi: int | None, ci: int | None) -> OwnedInstance:
        return OwnedInstance(
            device,
            uuid(3),
            None,
            19,
            "1g.10gb",
            Placement(2, 1),
            "boot",
            gpu_instance_id=gi,
            compute_instance_id=ci,
            uuid=f"MIG-{device}",
        )

    ledger = [owned("one", 9, 0), owned("two", 10, None), owned("three", None, None)]
    assert instances_by_device(ledger) == {"one": MadeInstance(9, 0, "MIG-one")}


@pytest.mark.parametrize(
    ("identity", "hit"),
    [(None, True), ("MIG-new", True), ("MIG-a,MIG-new", True), ("MIG-old", False), ("MIG-newer", False)],
)
def test_reasons_of_an_earlier_instance_with_the_same_ids_do_not_hit_the_new_one(identity, hit):
    for target in (HealthTarget(uuid(3), 9, 0), HealthTarget(uuid(3), 9)):
        found = states((target, InstanceSeen(identity)), (target, Xid(95)))
        assert bool(device_taints(ON_DEMAND, found, made(9))) == hit
        assert device_taints(ON_DEMAND, found, made(9, None)), "who it is will be known in a moment"
    gpu = states((HealthTarget(uuid(3)), Xid(95)))
    assert device_taints(ON_DEMAND, gpu, made(9))


def test_a_static_mig_device_is_known_by_its_uuid():
    target = HealthTarget(SMALL.gpu.uuid, 7, 0)
    for identity, hit in ((SMALL.uuid, True), ("MIG-old", False)):
        found = states((target, InstanceSeen(identity)), (target, Xid(95)))
        assert bool(device_taints(SMALL, found, {})) == hit


def test_lost_gpu_has_no_taint_for_missing_events():
    gpu = HealthTarget(WHOLE.uuid)
    lost = states((gpu, MonitoringState("no events")), (gpu, Unreachable()))
    for policy in (TaintPolicy(), TaintPolicy({"unmonitored": "NoSchedule"})):
        assert list(device_taints(WHOLE, lost, {}, policy)) == [taint("gpu-lost")]
    back = {gpu: observe(lost[gpu], PollResult(PolledHealth()), NOW + 1)}
    assert list(device_taints(WHOLE, back, {})) == [taint("unmonitored", effect="None")]


def test_mig_devices_have_no_nvlink_fabric():
    broken = PollResult(PolledHealth(fabric="broken", remap_pending=True))
    found = states((HealthTarget(WHOLE.uuid), broken), (HealthTarget(SMALL.gpu.uuid), broken))
    assert [item["key"] for item in device_taints(WHOLE, found, {})] == [
        PREFIX + "fabric",
        PREFIX + "row-remap",
    ]
    assert [item["key"] for item in device_taints(SMALL, found, {})] == [PREFIX + "row-remap"]


def test_of_several_xids_the_worst_counts_and_of_equals_the_first():
    gpu = HealthTarget(WHOLE.uuid)
    state = observe(HealthState(gpu), Xid(777), NOW)
    state = observe(state, Xid(79), NOW + 5)
    state = observe(state, Xid(48), NOW + 5)
    state = observe(state, Xid(62), NOW + 4)
    found = device_taints(WHOLE, {gpu: state}, {})
    assert [(item["value"], item["timeAdded"]) for item in found] == [("62", rfc3339(NOW + 4))]
    assert [reason.value for reason in device_reasons(WHOLE, {gpu: state}, {})] == ["62", "48", "79", "777"]
    again = observe(state, Xid(62), NOW + 500)
    assert device_taints(WHOLE, {gpu: again}, {}) == found, "the time is that of the first evidence"


def test_the_operator_sets_effects():
    found = states((HealthTarget(WHOLE.uuid), Xid(79)), (HealthTarget(WHOLE.uuid), Unreachable()))
    policy = TaintPolicy({"gpu-lost": "NoExecute", "unmonitored": "NoSchedule", "xid": "None"})
    assert device_taints(WHOLE, found, {}, policy) == (
        taint("gpu-lost", effect="NoExecute"),
        taint("xid", "79", "None"),
    )
    unreported = states((HealthTarget(WHOLE.uuid), MonitoringState("no")))
    assert device_taints(WHOLE, unreported, {}, policy) == (taint("unmonitored"),)
    information = states((HealthTarget(WHOLE.uuid), Xid(777)))
    assert device_taints(WHOLE, information, {}, TaintPolicy({"xid": "NoExecute"}))[0]["effect"] == "None"


def test_servers_that_refuse_the_effect_none_get_no_such_taint():
    policy = TaintPolicy({"xid": "None"}, OLDEST_TAINTS)
    found = states((HealthTarget(WHOLE.uuid), Xid(79)), (HealthTarget(WHOLE.uuid), MonitoringState("no")))
    assert device_taints(WHOLE, found, {}, policy) == ()


def test_mildest_taints_are_omitted_beyond_the_limit():
    reasons = [
        Reason(f"key-{number:02}", "", Severity.LOST if number > 3 else Severity.DEGRADED, NOW, NOW, "x")
        for number in range(20)
    ]
    keys = [item["key"] for item in taints_of(reasons, TaintPolicy())]
    assert keys == [f"{PREFIX}key-{number:02}" for number in range(4, 20)]


def test_older_servers_get_the_four_worst_and_eviction_before_all_else():
    reasons = [
        Reason(key, "", severity, NOW, NOW, "x")
        for key, severity in [
            ("ecc", Severity.UNHEALTHY), ("fabric", Severity.DEGRADED), ("gpu-lost", Severity.LOST),
            ("recovery-action", Severity.UNHEALTHY), ("row-remap", Severity.DEGRADED), ("xid", Severity.UNHEALTHY),
        ]
    ]  # fmt: skip
    policy = TaintPolicy({"fabric": "NoExecute"}, OLDEST_TAINTS)
    found = [(item["key"].removeprefix(PREFIX), item["effect"]) for item in taints_of(reasons, policy)]
    assert found == [
        ("ecc", "NoSchedule"),
        ("fabric", "NoExecute"),
        ("gpu-lost", "NoSchedule"),
        ("recovery-action", "NoSchedule"),
    ]


@pytest.mark.parametrize(
    ("device", "effect", "is_held", "is_shared", "withdrawn"),
    [
        (WHOLE, "None", False, False, False),
        (WHOLE, "NoSchedule", False, False, True),
        (WHOLE, "NoExecute", False, False, True),
        (WHOLE, "NoSchedule", True, False, False),
        (WHOLE, "NoSchedule", True, True, True),
        (SMALL, "NoSchedule", True, True, True),
        (COUNTED, "NoSchedule", False, False, True),
        (COUNTED, "NoSchedule", True, False, False),
        (COUNTED, "NoSchedule", True, True, False),
    ],
)
def test_devices_are_withdrawn_if_taints_keep_no_pod_away(device, effect, is_held, is_shared, withdrawn):
    found = [{"key": "k", "effect": effect}]
    assert is_withdrawn(device, found, is_held=is_held, is_shared=is_shared) is withdrawn
    assert not is_withdrawn(device, [], is_held=is_held, is_shared=is_shared)


_reasons = st.builds(
    Reason,
    key=st.one_of(st.sampled_from(TAINTED_KEYS), st.from_regex(r"[a-z]{1,8}", fullmatch=True)),
    value=st.sampled_from(["", "13", "79", "pending"]),
    severity=st.sampled_from(list(Severity)[1:]),
    since=st.integers(NOW, NOW + 3),
    last_at=st.just(NOW),
    text=st.just("x"),
)


@given(st.lists(_reasons, max_size=40), st.randoms(use_true_random=False))
def test_few_taints_one_a_key_whatever_the_order(reasons, random):
    found = taints_of(reasons, TaintPolicy())
    keys = [item["key"] for item in found]
    assert keys == sorted(set(keys))
    assert len(found) <= MAX_TAINTS
    assert all(is_label_key(item["key"]) and is_label_value(item.get("value") or "") for item in found)
    random.shuffle(reasons)
    assert taints_of(reasons, TaintPolicy()) == found
    worst = max((reason.severity for reason in reasons if reason.key != "slowdown"), default=Severity.OK)
    assert any(item["effect"] == "NoSchedule" for item in found) == (worst >= Severity.DEGRADED)
