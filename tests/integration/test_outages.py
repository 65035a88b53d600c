"""Parts fail and come back under the whole daemon: API server, kubelet, NVML, driver, disk, clock."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dra_driver.kube import client
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, Node


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the hardware come sooner; nothing else differs."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("dra_driver.inventory.discovery._LOOK_EVERY_S", 0.05)


def prepared(node: Node, count: int) -> dict[ClaimRef, Prepared]:
    """Claims on the first GPUs, each with its answer."""
    refs = [node.allocated_by_hand(device["name"], device["name"]) for device in node.devices()[:count]]
    return {ref: node.ready(ref) for ref in refs}


# --- API server --------------------------------------------------------------------------------------


def test_daemon_that_starts_without_api_server_serves_what_it_knows(node: Node) -> None:
    """Prepared claims prepare again and Unprepare works; what changed meanwhile is published afterwards."""
    answers = prepared(node, 3)
    node.driver.stop()
    node.server.stop()
    node.start_driver()
    eventually(lambda: node.driver.discovery.inventory)
    for ref, answer in answers.items():
        assert node.ready(ref) == answer
    node.take_back(next(iter(answers)))
    fresh = ClaimRef("default", "fresh", "0-fresh")
    # It tries again until shortly before the deadline.
    assert isinstance(node.kubelet.prepare(DRIVER, [fresh], timeout_s=4)[fresh.uid], Failed)
    node.machine.remove_gpu(7)
    eventually(lambda: len(node.driver.discovery.inventory.gpus) == 7)
    node.server.start()
    node.wait_devices(7)
    eventually(lambda: not node.driver.problems())
    node.take_back(*answers)
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
    outcomes = node.kubelet.prepare(DRIVER, fresh, timeout_s=10)
    assert all(isinstance(outcome, Prepared) for outcome in outcomes.values()), outcomes
    node.take_back(*answers, *fresh)
    node.machine.remove_gpu(7)
    node.wait_devices(7)


# --- kubelet and load --------------------------------------------------------------------------------


class Load:
    """Threads that prepare and unprepare a claim each, over and over; `failures` are what went wrong."""

    def __init__(self, node: Node, count: int = 4) -> None:
        self._node = node
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.rounds = 0
        devices = [device["name"] for device in node.devices()[:count]]
        refs = [node.allocated_by_hand(f"load-{name}", name) for name in devices]
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in refs]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def more(self, rounds: int = 8) -> None:
        """Wait for so many rounds that went well."""
        wanted = self.rounds + rounds
        eventually(lambda: self.rounds >= wanted, 20)

    def _run(self, claim: ClaimRef) -> None:
        while not self._stop.is_set():
            if self._ask(self._node.prepare, claim) and self._ask(self._node.unprepare, claim):
                self.rounds += 1
        eventually(lambda: self._ask(self._node.unprepare, claim), 20)

    def _ask(self, call: Callable[[ClaimRef], dict[str, Any]], claim: ClaimRef) -> bool:
        try:
            outcome = call(claim)[claim.uid]
        except Exception as error:
            self.failures.append(str(error))
            self._stop.wait(0.01)
            return False
        if isinstance(outcome, Failed):
            self.failures.append(outcome.error)
        return not isinstance(outcome, Failed)


def fresh_state(node: Node) -> tuple[Any, ...]:
    return node.specs(), node.records(), [entry["spec"].get("devices", []) for entry in node.slices()]


def test_driver_is_reloaded_under_load(node: Node) -> None:
    """What fails meanwhile says why; afterwards all is as on a fresh node."""
    before = fresh_state(node)
    with Load(node) as load:
        for version in ("590.10.01", None):
            load.more()
            node.machine.unload_driver()
            node.wait_devices(0)
            node.machine.load_driver(version)
            node.wait_devices(8)
        load.more()
    assert all("driver" in text or "NVML" in text or "usable" in text for text in load.failures), (
        load.failures
    )
    node.machine.load_driver("580.95.05")
    eventually(lambda: fresh_state(node) == before)


# --- GPUs --------------------------------------------------------------------------------------------


def test_hanging_nvml_delays_nobody_who_needs_it_not(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one GPU hangs every call of NVML, known devices are served, and a call that needs a look is bounded."""
    monkeypatch.setattr("dra_driver.claims.prepare._SCAN_WAIT_S", 0.2)
    known = prepared(node, 4)
    others = [
        node.allocated_by_hand(f"other-{device['name']}", device["name"]) for device in node.devices()[4:]
    ]
    unknown = node.allocated_by_hand("unknown", "gpu-00000000")
    node.machine.set_fault("nvmlDeviceGet*", delay_s=3.0, count=1, gpu=0)
    node.driver.discovery.request_rescan()
    eventually(lambda: not node.machine.current().faults)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(node.kubelet.prepare, DRIVER, [one], 2.9) for one in others]
        refused = pool.submit(node.kubelet.prepare, DRIVER, [unknown], 4.0)
        assert all(isinstance(outcome, Prepared) for call in calls for outcome in call.result().values())
        assert isinstance(refused.result()[unknown.uid], Failed)
    node.take_back(*known, *others)
    assert (node.specs(), node.records()) == ([], [])


def test_gpu_that_is_drained_under_its_claim(node: Node) -> None:
    """Its claim can be taken back, the other claims do not notice, and the GPU serves again when it is back."""
    before = [device["name"] for device in node.devices()]
    answers = prepared(node, 3)
    lost, *others = answers
    uuid = node.machine.gpu(0).uuid
    node.machine.remove_gpu(uuid)
    node.wait_devices(7)
    for ref in others:
        assert node.ready(ref) == answers[ref]
    node.take_back(lost)
    node.machine.unload_driver()
    node.machine.add_gpu(node.machine.current().by_uuid[uuid].model)
    node.machine.load_driver()
    eventually(lambda: isinstance(node.prepare(lost)[lost.uid], Prepared))
    node.take_back(*answers)
    eventually(lambda: [device["name"] for device in node.devices()] == before)
    assert (node.specs(), node.records()) == ([], [])


# --- disk --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for little."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root")
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,nr_inodes=400", "tmpfs", str(place)], check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
def test_real_disk_without_room(make_node: Callable[..., Node], small_disk: Path) -> None:
    """Claims that are prepared stay so and can go; new ones hear what is wrong and succeed once it is put right."""
    node = make_node()
    plugins = small_disk / "p"
    node.plugin_dir = plugins / DRIVER
    node.running(kubelet_plugins_directory_path=str(plugins))
    answers, new = prepared(node, 2), node.claim("new")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        file.writelines(itertools.repeat(b"x" * 4096))
    outcome = node.prepare(new)[new.uid]
    assert isinstance(outcome, Failed)
    assert "the disk is full" in outcome.error
    first, second = answers
    assert node.ready(first) == answers[first]
    node.take_back(first)
    filler.unlink()
    node.ready(new)
    assert node.ready(second) == answers[second]
    node.take_back(second, new)
    assert (node.specs(), node.records()) == ([], [])


# --- clock -------------------------------------------------------------------------------------------


class JumpedTime:
    """Stands in for `time` in the driver's modules: gRPC would take a jump of its own for a missed deadline."""

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
        for _ in range(2):  # also after it was taken back
            node.ready(other)
            node.take_back(other)
    assert node.slices() == published
    node.take_back(*answers)
    assert (node.specs(), node.records()) == ([], [])
