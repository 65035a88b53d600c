"""A look in the background hangs in NVML: pods start and end meanwhile, and all goes on as before when it ends."""

from __future__ import annotations

import threading
import time

import pytest

from dra_driver.model.claim import Failed
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.scrapes import scraped
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, sliced

USUAL_S = 3.0
"""How long a Prepare or Unprepare may take on a busy machine."""


def looks(node: Node) -> None:
    """Begin every look that runs in the background."""
    node.driver.discovery.request_rescan()
    node.driver.health.monitor.devices_changed()
    node.driver.mig.look_soon()
    node.driver.cleaner.look_soon()
    threading.Thread(target=scraped, args=(node.driver.metrics,), daemon=True).start()


def pods_start_and_end(node: Node, name: str, device: str, function: str) -> None:
    """One that only gets its GPU, and one whose GPU is changed."""
    for kind, config in (("plain", None), ("sliced", sliced("Long"))):
        ref = node.allocated_by_hand(f"{kind}-{name}", device, config=config)
        began = time.monotonic()
        answer = node.prepare(ref)[ref.uid]
        assert not isinstance(answer, Failed), (function, answer)
        node.take_back(ref)
        assert time.monotonic() - began < USUAL_S, function
        node.delete_claim(f"{kind}-{name}")


def test_every_nvml_call_of_a_look_may_hang(node: Node) -> None:
    devices = [device["name"] for device in node.devices()]
    nvml = HangingNvml()
    try:
        for _ in range(3):
            looks(node)
            time.sleep(0.5)
        calls = list(nvml.called)
        assert len(calls) > 30
        for number, function in enumerate(calls):
            with nvml.hanging(function):
                looks(node)
                assert nvml.reached.wait(10), function
                pods_start_and_end(node, str(number), devices[number % len(devices)], function)
            eventually(lambda: not node.driver.lanes.under_way())
        looks(node)
        eventually(lambda: node.driver.problems() == [])
        eventually(lambda: [device["name"] for device in node.devices()] == devices)
        eventually(lambda: not any(device.get("taints") for device in node.devices()))
    finally:
        nvml.leave()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlShutdown"])
def test_closing_and_opening_nvml_anew_may_hang(node: Node, function: str) -> None:
    """As after a GPU has come. What is prepared ends, and claims that need no NVML are prepared in the usual time."""
    devices = [device["name"] for device in node.devices()]
    held = node.allocated_by_hand("held", devices[0], config=sliced("Long"))
    node.ready(held)
    nvml = HangingNvml(node.driver.discovery.nvml.session)
    try:
        with nvml.hanging(function):
            node.machine.add_gpu(node.machine.gpu(0).model)
            assert nvml.reached.wait(20)
            pods_start_and_end(node, "meanwhile", devices[1], function)
            began = time.monotonic()
            node.take_back(held)
            assert time.monotonic() - began < USUAL_S
            assert node.records() == []
        node.wait_devices(len(devices) + 1)
        eventually(lambda: node.driver.problems() == [])
        assert node.machine.timeslice(0) == 0
    finally:
        nvml.leave()
