"""Parts fail and come back under the whole daemon: API server, kubelet, NVML, driver, disk, clock."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from dra_driver.kube import client
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, Node


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of the hardware are more frequent; nothing else differs."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("dra_driver.inventory.discovery._CHECK_EVERY_S", 0.05)


def prepared(node: Node, count: int) -> dict[ClaimRef, Prepared]:
    """Claims on the first GPUs, each with its answer."""
    refs = [node.allocated_by_hand(device["name"], device["name"]) for device in node.devices()[:count]]
    return {ref: node.ready(ref) for ref in refs}


# --- API server --------------------------------------------------------------------------------------


def test_daemon_that_starts_without_api_server_serves_what_it_knows(node: Node) -> None:
    """Prepare of prepared claims and Unprepare work; changes are published later."""
    answers = prepared(node, 3)
    node.driver.stop()
    node.server.stop()
    node.start_driver()
    eventually(lambda: node.driver.discovery.inventory)
    for ref, answer in answers.items():
        assert node.ready(ref) == answer
    node.must_unprepare(next(iter(answers)))
    fresh = ClaimRef("default", "fresh", "0-fresh")
    # It tries again until shortly before the deadline.
    assert isinstance(node.kubelet.prepare(DRIVER, [fresh], timeout_s=4)[fresh.uid], Failed)
    node.machine.remove_gpu(7)
    eventually(lambda: len(node.driver.discovery.inventory.gpus) == 7)
    node.server.start()
    node.wait_devices(7)
    eventually(lambda: not node.driver.problems())
    node.must_unprepare(*answers)
    assert (node.specs(), node.records()) == ([], [])


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda server: server.faults.silence_connections(), id="acknowledged"),
        pytest.param(
            lambda server: server.vanish(),
            id="vanished",
            marks=[
                pytest.mark.root,
                pytest.mark.skipif(os.geteuid() != 0, reason="a packet filter needs root"),
            ],
        ),
    ],
)
def test_prepare_waits_for_one_attempt_when_another_api_server_takes_over(
    node: Node, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Any], None]
) -> None:
    """No RST says that the connections lead nowhere. One attempt is over in time for a Prepare of ten seconds."""
    assert client.ATTEMPT_S < 10
    monkeypatch.setattr(client, "ATTEMPT_S", 0.5)
    node.driver.stop()
    node.start_driver()
    node.wait_devices(8)
    answers = prepared(node, 2)
    fresh = [
        node.allocated_by_hand(f"fresh-{device['name']}", device["name"]) for device in node.devices()[2:]
    ]
    lose(node.server)
    outcomes = node.kubelet.prepare(DRIVER, fresh, timeout_s=20)
    assert all(isinstance(outcome, Prepared) for outcome in outcomes.values()), outcomes
    node.must_unprepare(*answers, *fresh)
    node.machine.remove_gpu(7)
    node.wait_devices(7)


# --- GPUs --------------------------------------------------------------------------------------------


def test_gpu_that_is_drained_under_its_claim(node: Node) -> None:
    """Its claim can be unprepared, other claims are not affected, and the GPU works again when it returns."""
    before = [device["name"] for device in node.devices()]
    answers = prepared(node, 3)
    lost, *others = answers
    uuid = node.machine.gpu(0).uuid
    node.machine.remove_gpu(uuid)
    node.wait_devices(7)
    for ref in others:
        assert node.ready(ref) == answers[ref]
    node.must_unprepare(lost)
    node.machine.unload_driver()
    node.machine.add_gpu(node.machine.current().by_uuid[uuid].model)
    node.machine.load_driver()
    eventually(lambda: isinstance(node.prepare(lost)[lost.uid], Prepared))
    node.must_unprepare(*answers)
    eventually(lambda: [device["name"] for device in node.devices()] == before)
    assert (node.specs(), node.records()) == ([], [])


# --- clock -------------------------------------------------------------------------------------------


class JumpedTime:
    """Replaces `time` in the driver's modules, because gRPC would treat a jump of its own clock as a missed
    deadline.
    """

    def __init__(self, jump_s: float) -> None:
        self._jump_s = jump_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return time.time() + self._jump_s

    def time_ns(self) -> int:
        return time.time_ns() + int(self._jump_s * 1e9)


@pytest.mark.parametrize("jump_s", [10 * 365 * 86400.0, -10 * 365 * 86400.0], ids=["forward", "back"])
def test_clock_that_jumps_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Ten years in either direction, under the running daemon and over its restart."""
    answers = prepared(node, 2)
    published = node.slices()
    ours = [module for name, module in sys.modules.items() if name.startswith("dra_driver.")]
    jumped = [module for module in ours if getattr(module, "time", None) is time]
    assert jumped
    for module in jumped:
        monkeypatch.setattr(module, "time", JumpedTime(jump_s))
    for restart in (False, True):
        if restart:
            driver = node.restart_driver()
            eventually(lambda driver=driver: not driver.problems())
        for ref, answer in answers.items():
            assert node.ready(ref) == answer
        other = node.claim(f"other-{int(restart)}")
        for _ in range(2):  # also after it was unprepared
            node.ready(other)
            node.must_unprepare(other)
    assert node.slices() == published
    node.must_unprepare(*answers)
    assert (node.specs(), node.records()) == ([], [])
