"""What the whole driver shows of trouble with GPUs: metrics, taints, the status of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from dra_driver.app.daemon import Driver
from dra_driver.health import poller
from dra_driver.kubelet.pb import dra_health_v1_pb2 as v1
from tests.fakes.scrapes import by_label
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, received
from tests.integration.test_mig import named


def shown(driver: Driver, name: str, *labels: str) -> Mapping[tuple[str, ...], float]:
    return by_label(driver.metrics, f"nvidia_dra_{name}", *labels)


def register_again(driver: Driver, gpu_uuid: str) -> None:
    """Register for events again: a change of MIG mode ends registrations, on real GPUs too, and Xids are
    then missed.
    """
    watch = driver.health.monitor
    before = watch.pollers[gpu_uuid]._set_number
    watch.devices_changed()
    eventually(lambda: watch.pollers[gpu_uuid]._set_number != before)
    eventually(lambda: received(driver) == len(watch.pollers))


def health_of(driver: Driver, device: str) -> int:
    found = driver.health.stream.snapshot().devices
    return next(entry.health for entry in found if entry.device.device_name == device)


def test_an_nvidia_driver_that_goes_away_is_a_problem_though_the_plugin_is_ready(
    make_node: Callable[..., Node],
) -> None:
    node = make_node().running()
    driver = node.driver
    eventually(lambda: list(shown(driver, "node_problem", "driver").values()) == [0])
    node.machine.unload_driver()
    eventually(lambda: list(shown(driver, "node_problem", "driver").values()) == [1])
    assert list(shown(driver, "ready", "driver").values()) == [1]
    node.machine.load_driver()
    eventually(lambda: list(shown(driver, "node_problem", "driver").values()) == [0])


def test_trouble_of_a_mig_device_is_shown_and_ends_with_it(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "_POLL_EVERY_S", 1000.0)
    node = make_node().running(8 * 26, dynamic_mig=True)
    driver = node.driver
    name = named(node, "1g.10gb", 0)
    bystander = named(node, "1g.10gb", 1)
    for claim, device in (("keeps", bystander), ("first", name)):
        ref = node.allocated_by_hand(claim, device)
        node.ready(ref)
    made = driver.ledger.created_instance(name)
    assert made is not None
    ids = (made.gpu_instance_id, made.compute_instance_id)
    register_again(driver, made.gpu_uuid)
    node.machine.raise_xid(0, 95, gpu_instance=ids[0], compute_instance=ids[1])

    def tainted() -> list[str]:
        return [device["name"] for device in node.devices() if device.get("taints")]

    eventually(lambda: tainted() == [name])
    labels = ("parent_uuid", "uuid", "mig_instance")
    assert shown(driver, "mig_severity", *labels) == {(made.gpu_uuid, made.uuid, f"{ids[0]}/{ids[1]}"): 3}
    assert shown(driver, "gpu_severity", "uuid")[made.gpu_uuid,] == 0
    assert (health_of(driver, name), health_of(driver, bystander)) == (v1.UNHEALTHY, v1.HEALTHY)
    node.must_unprepare(ref)
    eventually(lambda: tainted() == [])
    node.ready(node.allocated_by_hand("again", name))
    successor = driver.ledger.created_instance(name)
    assert successor is not None
    assert (successor.gpu_instance_id, successor.compute_instance_id) == ids
    assert health_of(driver, name) == v1.HEALTHY
    assert tainted() == []
