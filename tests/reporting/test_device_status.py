"""What a claim's status says of its devices, and whom it concerns when a GPU or an instance goes bad."""

from __future__ import annotations

import pytest

from dra_driver.health.book import change_between
from dra_driver.health.rules.state import REBOOT_AFTER_S, UNRESPONSIVE_AFTER_S, observe
from dra_driver.model.claim import HeldDevice
from dra_driver.model.health import Hanging, HealthState, HealthTarget, Reason, Severity
from dra_driver.model.inventory import DynamicMigDevice
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.reporting.rules.device_status import device_statuses, event_of, is_hit
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
    hold,
    inventory,
    record,
    uuid,
)
from tests.fakes.tables import tabled

ON_DEMAND = "gpu-00000001-mig-1g10gb-19-2"
MADE = OwnedInstance(
    ON_DEMAND, uuid(1), None, 19, "1g.10gb", Placement(2, 1), "boot-1", "ready", 9, 0, "MIG-made"
)
OFFER = inventory(*MIXED.gpus)
OFFER.__dict__["by_name"] = {
    **MIXED.by_name,
    ON_DEMAND: DynamicMigDevice(ON_DEMAND, h100(1), ONE_G, Placement(2, 1)),
}
HELD = {name: hold(name) for name in (GPU_0, MIG_1G, MIG_3G)}
HELD[ON_DEMAND] = hold(
    GPU_0, device=ON_DEMAND, kind="mig", uuid="", gpu_uuid=uuid(1), placement=Placement(2, 1)
)
XID = Reason("xid", "95", Severity.UNHEALTHY, 10, 10, "not contained")
LOST = Reason("gpu-lost", "", Severity.LOST, 20, 20, "does not answer", "poll")
ECC = Reason("ecc", "uncorrected", Severity.DEGRADED, 5, 5, "3 errors", "poll")
FABRIC = Reason("fabric", "broken", Severity.UNHEALTHY, 5, 5, "no fabric", "poll")
REASONS = {"xid": XID, "lost": LOST, "ecc": ECC, "fabric": FABRIC}


def hit(gpu, *instances):
    return HealthTarget(uuid(gpu), *instances)


def created_instance(device):
    return MADE if device == ON_DEMAND else None


def readiness(name, states, known=OFFER):
    [status] = device_statuses(record(HELD[name]), known, created_instance, states)
    return status.ready, status.reason, status.message


@tabled("name", "target", "reasons", "expected")
def test_a_device_is_ready_when_it_can_do_its_work(name, target, reasons, expected):
    state = HealthState(hit(*target), tuple(REASONS[reason] for reason in reasons))
    assert readiness(name, {state.target: state}) == tuple(expected)


@pytest.mark.parametrize("known", [None, inventory(h100(1))], ids=["not discovered yet", "GPU gone"])
def test_of_a_device_that_is_not_there_its_gpu_counts(known):
    for name, gpu in ((GPU_0, uuid(0)), (MIG_1G, uuid(2))):
        states = {HealthTarget(gpu): HealthState(HealthTarget(gpu), (FABRIC, LOST))}
        ready, reason, message = readiness(name, states, known)
        assert (ready, reason) == (False, "GPULost")
        assert ("no fabric" in message) == (name == GPU_0)


@pytest.mark.parametrize("known", [inventory(h100(0), cards=(card(0),)), inventory(cards=(bound(0),))])
def test_a_card_is_reported_whether_nvml_shows_it_or_not(known):
    held = HeldDevice(VFIO_0, "vfio", "0b1c", uuid(0))
    [status] = device_statuses(record(held), known, created_instance, {})
    facts = status.facts
    assert (status.ready, facts.type, facts.uuid, facts.parent_uuid) == (True, "vfio", "0b1c", None)
    assert (facts.product_name, facts.pci_bus_id) == ("GH100 [H100 SXM5 80GB]", "0000:10:00.0")


def test_a_hang_is_an_event_also_of_a_gpu_that_was_unhealthy_before():
    state = HealthState(hit(0), (XID,))
    events = []
    for seen in (UNRESPONSIVE_AFTER_S, UNRESPONSIVE_AFTER_S + 5, REBOOT_AFTER_S, REBOOT_AFTER_S + 5, None):
        after = observe(
            state, Hanging() if seen is None else Hanging("the switch of the MIG mode", seen), 2000
        )
        event = event_of(change_between(state, after, 2000))
        events.append(None if event is None else event[0])
        state = after
    assert events == ["GPUUnhealthy", None, "GPUUnhealthy", None, None]
    assert state.reasons == (XID,)


@tabled("target", "devices")
def test_an_instance_concerns_only_who_holds_a_device_in_it(target, devices):
    where = hit(*target)
    found = {name for name in HELD if is_hit(record(HELD[name]), where, OFFER, created_instance)}
    assert found == set(devices)
    everything = record(*HELD.values())
    assert is_hit(everything, where, OFFER, created_instance) == bool(devices)
