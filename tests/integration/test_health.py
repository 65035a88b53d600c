"""What claims report about the health of their devices, on a whole node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dra_driver.model.claim import Failed
from dra_driver.model.steps import SetTimeSlice
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import Json, Node, poll_all, sliced


def reported(node: Node, reason: str) -> list[str]:
    """`kind/name` of what has an event with this reason; one entry for each event."""
    return sorted("{kind}/{name}".format(**event["involvedObject"]) for event in node.events(reason))


def ready(node: Node) -> dict[str, tuple[str, str]]:
    """Status and reason of the condition Ready of each claim's first device, by the claim's name."""
    found: dict[str, tuple[str, str]] = {}
    for entry in node.server.objects("resourceclaims"):
        devices: list[Json] = entry["status"].get("devices") or []
        for device in devices[:1]:
            [condition] = device["conditions"]
            found[entry["metadata"]["name"]] = (condition["status"], condition["reason"])
    return found


PREPARED = ("True", "Prepared")


def test_the_status_follows_a_gpu_that_is_lost_and_comes_back(node: Node) -> None:
    node.ready(node.claim("one"))
    eventually(lambda: ready(node) == {"one": PREPARED})
    node.machine.lose_gpu(0)
    eventually(lambda: ready(node) == {"one": ("False", "GPULost")})
    node.machine.restore_gpu(0)
    node.driver.discovery.request_rescan()
    poll_all(node.driver)
    eventually(lambda: ready(node) == {"one": PREPARED})


def test_an_operation_that_does_not_end_makes_its_gpu_unresponsive(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.health.rules.state.UNRESPONSIVE_AFTER_S", 3600)
    for place in ("monitor", "poller"):  # no GPU is ill because its polls hang
        monkeypatch.setattr(f"dra_driver.health.{place}.OVERDUE_S", 3600)
    driver = node.driver
    let, looks = threading.Event(), threading.Event()

    def hanging(call: Callable[..., Any], begun: threading.Event) -> Callable[..., Any]:
        def hangs(*given: Any) -> Any:
            begun.set()
            let.wait(PATIENCE_S)
            return call(*given)

        return hangs

    runner, source = driver.cleaner.runner.runners[SetTimeSlice], driver.health.monitor.source
    monkeypatch.setattr(runner, "do", hanging(runner.do, threading.Event()))
    monkeypatch.setattr(source, "read", hanging(source.read, looks))
    driver.health.monitor.devices_changed()
    assert looks.wait(PATIENCE_S), "the health monitor hangs in NVML as well"
    wanted = node.devices()[0]["name"]
    ref = node.allocated_by_hand("one", wanted, config=sliced("Long"))
    assert isinstance(driver.claims.service.prepare([ref], 3.0)[ref.uid], Failed)
    monkeypatch.setattr("dra_driver.health.rules.state.UNRESPONSIVE_AFTER_S", 0)
    uuid = next(gpu.uuid for gpu in node.machine.current().present if wanted.endswith(gpu.uuid[4:12]))

    def tainted() -> dict[str, list[Json]]:
        return {device["name"]: device["taints"] for device in node.devices() if device.get("taints")}

    [taint] = eventually(tainted)[wanted]
    assert (taint["key"], taint["effect"]) == ("gpu.nvidia.com/unresponsive", "NoSchedule")
    assert list(tainted()) == [wanted]
    reason = "the GPU does not respond: the time slice change takes too long; "
    reason += "if this lasts, drain the node and reboot it"
    text = f"GPU {uuid}: {reason}"
    concerned = ["Node/node-a"]  # the claim ended with its Prepare
    eventually(lambda: reported(node, "GPUUnhealthy") == concerned)
    assert {event["message"] for event in node.events("GPUUnhealthy")} == {text}
    note = f"GPU {wanted} ({uuid}): {reason}"
    eventually(lambda: note in driver.probes.notes())
    assert driver.probes.readiness() == []
    labels = {"driver": "gpu.nvidia.com", "uuid": uuid, "reason": "unresponsive"}
    assert driver.metrics.registry.get_sample_value("nvidia_dra_gpu_reason", labels) == 2.0
    eventually(lambda: uuid in (node.plugin_dir / "health.json").read_text())  # doctor reads it there
    monkeypatch.setattr("dra_driver.health.rules.state.REBOOT_AFTER_S", 0)
    eventually(lambda: reported(node, "GPUUnhealthy") == sorted(concerned * 2))
    late = [event for event in node.events("GPUUnhealthy") if "minutes; drain the node" in event["message"]]
    assert len(late) == len(concerned)
    let.set()
    eventually(lambda: reported(node, "GPURecovered") == concerned)
    eventually(lambda: tainted() == {})
    eventually(lambda: note not in driver.probes.notes())
