"""`gpu-dra-driver detach` as a process, with a running driver."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dra_driver.claims import lifecycle
from dra_driver.claims.waiting import WaitTimeouts
from dra_driver.inventory.detachment import Detachments, nvml_paused
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node
from tests.integration.test_process import call
from tests.integration.test_sharing import parameters


@pytest.fixture
def detach(node: Node) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *words: call("detach", *words, *node.machine_flags)


def reset(node: Node, gpu: str) -> subprocess.CompletedProcess[str]:
    return call("simulate", "reset", gpu, "--simulator-dir", str(node.settings.simulator_dir))


def test_a_gpu_is_reset_while_the_driver_is_detached(node: Node, detach: Callable[..., Any]) -> None:
    late = node.claim("late")
    assert "in use by" in reset(node, "3").stderr
    done = detach("--for", "1h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpu-dra-driver has closed NVML until 2")
    assert reset(node, "3").returncode == 0
    until = re.search("until (.*)", done.stdout)
    assert until is not None
    assert f" (instead of {until[1]})\n" in detach("--for", "30m").stdout
    shown = call("inspect", *node.machine_flags)
    assert (shown.returncode, "NVML is closed until" in shown.stderr) == (1, True), (
        "it must not open NVML now"
    )
    checks = {
        one["check"]: one
        for one in json.loads(call("doctor", "-o", "json", *node.machine_flags).stdout)["checks"]
    }
    assert checks["NVML"]["status"] == "FAIL"
    assert "detach --end" in checks["NVML"]["remedy"]
    eventually(lambda: node.devices() == [])
    assert "NVML is closed until" in str(node.prepare(late))
    assert detach("--end").stdout == "gpu-dra-driver opens NVML again\n"
    node.wait_devices(8)
    assert detach("--end").stdout == "there was no detachment to end\n"


def test_doctor_opens_no_nvml_during_a_pause_and_says_what_to_do_if_it_stays(node: Node) -> None:
    assert node.driver is not None
    session = node.driver.discovery.nvml.session
    with nvml_paused(session, Detachments(node.plugin_dir, None), "tests", lambda: 10.0):
        report = json.loads(call("doctor", "-o", "json", *node.machine_flags).stdout)
    [found] = [one for one in report["checks"] if one["check"] == "NVML"]
    assert found["seen"] == "NVML is closed for a moment, so that a GPU can be changed"
    assert (found["status"], "drain and reboot the node" in found["remedy"]) == ("WARN", True)
    eventually(lambda: node.driver.problems() == [])


def test_time_slices_that_the_closing_lost_are_set_again(node: Node, detach: Callable[..., Any]) -> None:
    """And claims are in the way, unless the GPUs are others or it is forced."""
    with node.machine._change() as state:
        state.by_uuid[node.machine.gpu(1).uuid].persistence = 0
    config = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
    name = node.devices()[1]["name"]
    ref = node.allocated_by_hand("sliced", name, config=config)
    node.prepare(ref)
    assert node.machine.timeslice(1) == 3
    for words in ([], [name], ["0", node.machine.gpu(1).bus_id]):
        done = detach(*words)
        assert done.returncode == 1
        assert "claims use the GPUs: default/sliced; delete their pods first" in done.stderr
    assert len(node.devices()) == 8
    assert detach("0", "gpu-none").returncode == 2
    assert detach("0", "7").returncode == 0
    eventually(lambda: node.devices() == [])
    assert node.machine.timeslice(1) == 0, "the driver let go of the GPU"
    assert detach("--end").returncode == 0
    node.wait_devices(8)
    eventually(lambda: node.machine.timeslice(1) == 3)
    assert detach("--force").returncode == 0
    assert node.unprepare(ref) == {ref.uid: None}, "a claim ends without NVML"
    ledger = node.settings.plugin_directory / "ledger"
    assert len(list(ledger.glob("*.json"))) == 1, "nvidia-smi, which opens NVML, did not run"
    assert detach("0", "--for", "10m", "--force").returncode == 0, "longer, without opening NVML in between"
    assert detach(name, "--for", "10m").returncode == 0
    assert detach("0", "--for", "10m").returncode == 2, "which one that is, is not known now"
    detach("--end")
    eventually(lambda: not list(ledger.glob("*.json")))


@pytest.mark.parametrize("words", [["3"], ["--force"], ["--for", "5m"]])
def test_end_takes_nothing_else(words: list[str]) -> None:
    done = call("detach", "--end", *words)
    assert (done.returncode, "--end cannot be combined with" in done.stderr) == (2, True)


def test_a_gpu_that_fell_off_the_bus_is_named_as_the_alert_names_it(
    node: Node, detach: Callable[..., Any]
) -> None:
    uuid, bus = node.machine.gpu(3).uuid, node.machine.gpu(3).bus_id
    name = next(device["name"] for device in node.devices() if uuid in str(device))
    ref = node.allocated_by_hand("held", name)
    node.prepare(ref)
    node.machine.lose_gpu(3)
    for given in (uuid, bus, name):
        assert "claims use the GPUs: default/held" in detach(given).stderr
    assert "is not reliable" in detach("3").stderr
    assert node.unprepare(ref) == {ref.uid: None}
    assert detach(uuid).returncode == 0
    detach("--end")


def test_a_lost_gpu_is_known_by_its_bus_id_when_no_plugin_saw_it(
    node: Node, detach: Callable[..., Any]
) -> None:
    uuid, bus = node.machine.gpu(3).uuid, node.machine.gpu(3).bus_id
    names = [device["name"] for device in node.devices()]
    held, other = node.allocated_by_hand("held", names[3]), node.allocated_by_hand("other", names[4])
    node.prepare(held)
    node.prepare(other)
    node.stop_driver()
    (node.plugin_dir / "health.json").unlink(missing_ok=True)
    node.machine.lose_gpu(3)
    for given in (uuid, bus, names[3]):
        done = detach(given)
        assert "claims use the GPUs: default/held; delete their pods" in done.stderr
    (node.plugin_dir / "claims" / f"{held.uid}.json").unlink()
    for given in (uuid, bus, names[3]):
        assert detach(given).returncode == 0, "the claim on another GPU does not count"
        detach("--end")


@pytest.mark.parametrize("time", ["5", "9s", "25h", "-5m", "", "1m30s", "5 m"])
def test_a_time_of_another_form_is_refused(time: str) -> None:
    done = call("detach", f"--for={time}")
    assert (done.returncode, "give a time from 10s to 24h" in done.stderr) == (2, True)


def test_an_agent_that_keeps_nvml_open_keeps_a_gpu_from_mig_mode(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first MIG device of a GPU needs the mode; without the agent, or with the mode on, it works."""
    monkeypatch.setattr(lifecycle, "WaitTimeouts", partial(WaitTimeouts, last_s=42.4))
    node = make_node()
    node.start_driver(dynamic_mig=True)
    eventually(lambda: len(node.devices()) > 8)
    names = [device["name"] for device in node.devices()]
    first = next(name for name in names if "1g10gb" in name)
    ref = node.allocated_by_hand("cut", first)
    command = [sys.executable, "-m", "dra_driver.cli.main", "simulate", "client", "dcgm"]
    agent = subprocess.Popen(
        [*command, "--simulator-dir", str(node.settings.simulator_dir)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        assert "has NVML open" in agent.stdout.readline()
        refused = str(node.prepare(ref))
        assert "is in use" in refused
        assert "a monitor such as DCGM" in refused
        assert node.unprepare(ref) == {ref.uid: None}
    finally:
        agent.kill()
        agent.communicate()
    node.prepare(ref)
    eventually(lambda: node.machine.gpu(0).instances)
