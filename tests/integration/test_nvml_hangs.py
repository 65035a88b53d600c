"""A look in the background hangs in NVML: pods start and end meanwhile, and all goes on as before when it ends."""

from __future__ import annotations

import threading
import time

import pytest

from dra_driver.model.claim import Failed
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.scrapes import scraped
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, heard, poll_all, sliced

USUAL_S = 3.0
"""How long a Prepare or Unprepare may take on a busy machine."""


def tainted(node: Node) -> dict[str, list[str]]:
    """Keys and values of the taints by the index of the GPU."""
    order = [gpu.uuid[4:12] for gpu in node.machine.current().present]
    return {
        str(order.index(device["name"][-8:])): [
            "=".join(filter(None, (taint["key"].partition("/")[2], taint.get("value"))))
            for taint in device["taints"]
        ]
        for device in node.devices()
        if device.get("taints")
    }


@pytest.mark.parametrize("delay_s", [50, 600])
def test_xid_is_published_and_health_stays_fresh_whatever_another_gpu_does(
    node: Node, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    monkeypatch.setattr("dra_driver.health.monitor._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 0.1)
    eventually(lambda: heard(node.driver) == 8)
    monitor = node.driver.health.monitor
    uuids = [gpu.uuid for gpu in node.machine.current().present]
    node.machine.set_fault("nvml*", delay_s=delay_s, gpu=0)
    poll_all(node.driver)
    eventually(lambda: monitor.pollers[uuids[0]]._calling_since is not None)
    node.driver.discovery.request_rescan()
    node.driver.health.monitor.devices_changed()
    eventually(lambda: heard(node.driver) == 7)
    node.machine.raise_xid(5, 95)
    eventually(lambda: tainted(node) == {"5": ["xid=95"]})
    answers = [monitor.book._answers[uuid][1] for uuid in uuids[1:]]
    eventually(
        lambda: all(monitor.book._answers[u][1] > at for u, at in zip(uuids[1:], answers, strict=True))
    )
    monkeypatch.setattr("dra_driver.health.poller.OVERDUE_S", 0.2)
    eventually(lambda: tainted(node).get("0") == ["unresponsive=no-answer"])
    assert set(tainted(node)) == {"0", "5"}
    eventually(lambda: [event for event in node.events("GPUUnhealthy") if uuids[0] in event["message"]])
    eventually(lambda: [problem.code for problem in node.driver.health.problems()] == ["gpu-unresponsive"])
    node.machine.clear_faults()
    eventually(lambda: "0" not in tainted(node))


def test_every_gpu_is_unresponsive_while_one_call_blocks_all_of_nvml(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's kernel driver may hold a lock that every call needs."""
    monkeypatch.setattr("dra_driver.health.monitor._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 0.1)
    eventually(lambda: heard(node.driver) == 8)
    monkeypatch.setattr("dra_driver.health.poller.OVERDUE_S", 1.0)
    node.machine.set_fault("nvmlDeviceGet*", delay_s=600, gpu=0, blocks_all=True)
    eventually(lambda: tainted(node) == {str(index): ["unresponsive=no-answer"] for index in range(8)})
    assert {problem.code for problem in node.driver.health.problems()} == {"gpu-unresponsive"}
    held = node.allocated_by_hand("held", node.devices()[1]["name"])
    node.take_back(held)
    node.machine.clear_faults()
    eventually(lambda: tainted(node) == {})
    eventually(lambda: node.driver.problems() == [])


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
def test_closing_and_opening_nvml_anew_may_hang(
    node: Node, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """As after a GPU was added. Prepared claims end, claims that need no NVML are prepared in the usual time, and no
    GPU is reported as healthy until NVML answers again."""
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
            with monkeypatch.context() as patched:
                patched.setattr("dra_driver.health.monitor.OVERDUE_S", 0.5)
                node.driver.health.monitor.wake()
                eventually(lambda: [*tainted(node).values()] == [["unresponsive=no-answer"]] * 8)
        node.wait_devices(len(devices) + 1)
        eventually(lambda: node.driver.problems() == [])
        eventually(lambda: tainted(node) == {})
        assert node.machine.timeslice(0) == 0
    finally:
        nvml.leave()
