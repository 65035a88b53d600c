"""How devices of claims are used, in the metrics of a whole node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dra_driver.simulator import Machine
from tests.fakes.scrapes import by_label
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node

UTILISATION = "nvidia_dra_device_utilization_ratio"


def ratios(node: Node) -> dict[str, float]:
    return {
        device: value for (device,), value in by_label(node.driver.metrics, UTILISATION, "device").items()
    }


def test_mig_device_on_demand_is_measured_between_scrapes(make_node: Callable[..., Node]) -> None:
    node = make_node("hgx-h100-4")
    node.start_driver(dynamic_mig=True)
    device = eventually(lambda: [one["name"] for one in node.devices() if "-mig-1g10gb-19-" in one["name"]])[
        0
    ]
    node.ready(node.allocated_by_hand("part", device))
    gpu = _gpu_of(node.machine)
    instance = node.machine.gpu(gpu).instances[0].id
    node.machine.hold_gpu(gpu, 4711, "python3", gpu_instance=instance, utilisation=60)
    assert ratios(node) == {}, "the first look has nothing to compare with"
    assert eventually(lambda: ratios(node)) == {device: 0.6}
    processes = by_label(node.driver.metrics, "nvidia_dra_device_processes", "device")
    assert processes == {(device,): 1}


def _gpu_of(machine: Machine) -> int:
    return next(index for index in range(4) if machine.gpu(index).instances)


def test_scrape_that_hangs_on_a_gpu_delays_no_prepare_on_it(node: Node) -> None:
    names = [device["name"] for device in node.devices()]
    node.ready(node.allocated_by_hand("one", names[1]))
    node.machine.set_fault("nvmlDeviceGetPowerUsage", delay_s=15.0, gpu=node.machine.gpu(0).uuid)
    assert ratios(node) == {names[1]: 0}
    node.ready(node.allocated_by_hand("two", names[0]))
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("ask NVML (usage of GPU")]
    assert len(hanging) == 1, "it has not waited for the end of the scrape's call"
    assert ratios(node) == {names[1]: 0}
    node.machine.clear_faults()
