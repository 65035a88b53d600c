"""A background query hangs in NVML: pods still start and end, and everything continues when it returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dra_driver.inventory.detachment import Detachments
from dra_driver.model.claim import Failed, Prepared
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.scrapes import scraped
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, Json, Node, poll_all, received, sliced


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


def test_xid_is_published_and_health_stays_fresh_whatever_another_gpu_does(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 0.1)
    eventually(lambda: received(node.driver) == 8)
    monitor = node.driver.health.monitor
    uuids = [gpu.uuid for gpu in node.machine.current().present]
    node.machine.set_fault("nvml*", delay_s=600, gpu=0)
    poll_all(node.driver)
    eventually(lambda: monitor.pollers[uuids[0]]._calling_since is not None)
    node.driver.discovery.request_rescan()
    node.driver.health.monitor.devices_changed()
    eventually(lambda: received(node.driver) == 7)
    node.machine.raise_xid(5, 95)
    eventually(lambda: tainted(node).get("5") == ["xid=95"])
    answers = [monitor.book._answers[uuid][1] for uuid in uuids[1:]]
    eventually(
        lambda: all(monitor.book._answers[u][1] > at for u, at in zip(uuids[1:], answers, strict=True))
    )
    # On a busy machine a good GPU may be overdue for a moment too.
    monkeypatch.setattr("dra_driver.health.poller.OVERDUE_S", 2.0)
    eventually(
        lambda: tainted(node).get("0") == ["unresponsive=nvml-hangs"] and set(tainted(node)) == {"0", "5"}
    )
    eventually(lambda: [event for event in node.events("GPUUnhealthy") if uuids[0] in event["message"]])
    eventually(lambda: [problem.code for problem in node.driver.health.problems()] == ["gpu-unresponsive"])
    node.machine.clear_faults()
    eventually(lambda: "0" not in tainted(node))


def test_every_gpu_is_unresponsive_while_one_call_blocks_all_of_nvml(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's kernel driver may hold a lock that every call needs."""
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 0.1)
    eventually(lambda: received(node.driver) == 8)
    monkeypatch.setattr("dra_driver.health.poller.OVERDUE_S", 1.0)
    node.machine.set_fault("nvmlDeviceGet*", delay_s=600, gpu=0, blocks_all=True)
    poll_all(node.driver)
    eventually(lambda: tainted(node) == {str(index): ["unresponsive=nvml-hangs"] for index in range(8)})
    assert {problem.code for problem in node.driver.health.problems()} == {"gpu-unresponsive"}
    held = node.allocated_by_hand("held", node.devices()[1]["name"])
    node.must_unprepare(held)
    node.machine.clear_faults()
    eventually(lambda: tainted(node) == {})
    eventually(lambda: node.driver.problems() == [])


def looks(node: Node) -> None:
    """Start every query that runs in the background."""
    node.driver.discovery.request_rescan()
    node.driver.health.monitor.devices_changed()
    node.driver.layouts.wake()
    node.driver.cleaner.retry_now()
    threading.Thread(target=scraped, args=(node.driver.metrics,), daemon=True).start()


def pods_start_and_end(node: Node, name: str, device: str, function: str) -> None:
    """One that only gets its GPU, and one whose GPU is changed."""
    for kind, config in (("plain", None), ("sliced", sliced("Long"))):
        ref = node.allocated_by_hand(f"{kind}-{name}", device, config=config)
        answer = node.prepare(ref)[ref.uid]
        assert not isinstance(answer, Failed), (function, answer)
        node.must_unprepare(ref)
        node.delete_claim(f"{kind}-{name}")


def test_every_nvml_call_of_a_check_may_hang(node: Node) -> None:
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
                assert nvml.reached.wait(PATIENCE_S), function
                pods_start_and_end(node, str(number), devices[number % len(devices)], function)
            eventually(lambda: not node.driver.lanes.under_way())
        looks(node)
        eventually(lambda: node.driver.problems() == [])
        eventually(lambda: [device["name"] for device in node.devices()] == devices)
        eventually(lambda: not any(device.get("taints") for device in node.devices()))
    finally:
        nvml.leave()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlShutdown"])
def test_closing_and_reopening_nvml_may_hang(
    node: Node, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """As after a GPU was added. Prepared claims can be unprepared, claims without NVML are prepared in the
    usual time, and no GPU is reported as healthy until NVML answers again.
    """
    devices = [device["name"] for device in node.devices()]
    held = node.allocated_by_hand("held", devices[0], config=sliced("Long"))
    node.ready(held)
    nvml = HangingNvml(node.driver.discovery.nvml.session)
    try:
        with nvml.hanging(function):
            node.machine.add_gpu(node.machine.gpu(0).model)
            assert nvml.reached.wait(PATIENCE_S)
            pods_start_and_end(node, "meanwhile", devices[1], function)
            node.must_unprepare(held)
            assert node.records() == []
            with monkeypatch.context() as patched:
                patched.setattr("dra_driver.health.monitor.OVERDUE_S", 0.5)
                node.driver.health.monitor.wake()
                eventually(lambda: [*tainted(node).values()] == [["unresponsive=nvml-hangs"]] * 8)
        node.wait_devices(len(devices) + 1)
        eventually(lambda: node.driver.problems() == [])
        eventually(lambda: tainted(node) == {})
        assert node.machine.timeslice(0) == 0
    finally:
        nvml.leave()


def test_hang_on_one_gpu_and_a_bind_of_another_delay_no_claim_of_a_third(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bind needs NVML closed, and waits for that: claims that wait for the bind fail in this test."""
    monkeypatch.setattr("dra_driver.passthrough.steps._NVML_S", 600.0)
    node = make_node()
    node.machine.set_virtual_functions(0, 0)
    node.running(8 * 27, dynamic_mig=True, passthrough=True)

    def one_of(gpu: int, is_wanted: Callable[[Json], bool]) -> str:
        bus_id = node.machine.gpu(gpu).bus_id
        return next(
            device["name"]
            for device in node.devices()
            if device["attributes"]["resource.kubernetes.io/pciBusID"]["string"] == bus_id
            and is_wanted(device["attributes"])
        )

    def a_mig_device(gpu: int) -> str:
        return one_of(gpu, lambda attributes: attributes.get("profile") == {"string": "1g.10gb"})

    hangs = node.allocated_by_hand("hangs", a_mig_device(0))
    binds = node.allocated_by_hand("binds", one_of(1, lambda found: found["type"] == {"string": "vfio"}))
    session = node.driver.discovery.nvml.session
    node.machine.set_fault("nvmlDeviceCreateGpuInstanceWithPlacement", delay_s=600, gpu=0)
    with ThreadPoolExecutor() as calls:
        calls.submit(node.prepare, hangs)
        eventually(lambda: node.machine.gpu(0).mig_mode)
        bind = calls.submit(node.kubelet.prepare, DRIVER, [binds], 20.0)
        time.sleep(0.5)
        for gpu in range(2, 5):
            ref = node.allocated_by_hand(f"mig-{gpu}", a_mig_device(gpu))
            assert isinstance(node.prepare(ref)[ref.uid], Prepared)
            node.must_unprepare(ref)
        assert not bind.done()
        with monkeypatch.context() as patch:
            patch.setattr("dra_driver.journal.lanes.UNRESPONSIVE_AFTER_S", 0.5)
            refused = bind.result()[binds.uid]
            assert isinstance(refused, Failed), refused
            node.refused(binds, f"GPU {node.machine.gpu(0).uuid} does not respond")
        assert session.pauses == 0
        node.machine.clear_faults()
    eventually(lambda: not node.driver.lanes.under_way())
    assert isinstance(node.prepare(binds)[binds.uid], Prepared)


def test_shutdown_of_nvml_that_hangs_before_a_bind_is_reported_and_holds_up_no_other_claim(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.nvml.session._SHUTDOWN_S", 0.5)
    monkeypatch.setattr("dra_driver.nvml.session._OPENING_S", 0.5)
    monkeypatch.setattr("dra_driver.passthrough.steps._UNDO_S", 0.5)
    monkeypatch.setattr("dra_driver.passthrough.steps._NVML_S", 0.5)
    node = make_node()
    node.machine.set_virtual_functions(0, 0)
    node.running(16, passthrough=True)
    bus_id = node.machine.gpu(1).bus_id
    devices = {
        (
            entry["attributes"]["resource.kubernetes.io/pciBusID"]["string"],
            entry["attributes"]["type"]["string"],
        ): (entry["name"])
        for entry in node.devices()
    }
    [plain] = [devices[node.machine.gpu(2).bus_id, "gpu"]]
    binds = node.allocated_by_hand("binds", devices[bus_id, "vfio"])
    nvml = HangingNvml(node.driver.discovery.nvml.session)
    try:
        with nvml.hanging("nvmlShutdown"):
            node.refused(binds, "close NVML for a moment", "has not finished")
            eventually(lambda: not node.driver.lanes.under_way())
            assert not Detachments(node.plugin_dir, None).paused()
            pods_start_and_end(node, "meanwhile", plain, "nvmlShutdown")
            monkeypatch.setattr("dra_driver.inventory.discovery._HANG_AFTER_S", 0.2)
            eventually(
                lambda: any(
                    "has not answered for" in problem.text for problem in node.driver.discovery.problems()
                )
            )
            monkeypatch.undo()
        eventually(lambda: node.driver.problems() == [])
        assert isinstance(node.prepare(binds)[binds.uid], Prepared)
    finally:
        nvml.leave()
