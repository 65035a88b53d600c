"""MIG devices on demand, from slices to CDI and back, through the whole driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml

from dra_driver.claims import lifecycle
from dra_driver.claims.waiting import WaitTimeouts
from dra_driver.mig import mode
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.model.steps import STEPS
from dra_driver.mps_host.host_files import mps_layout
from dra_driver.nvml.session import NvmlSession
from dra_driver.simulator.catalogue import MACHINES
from tests.fakes.scrapes import by_label
from tests.fakes.tables import read_yaml
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, NODE, Node
from tests.integration.test_process import call

PER_GPU = 26  # 7 + 7 + 4 + 3 + 2 + 1 + 1 placements, and the whole GPU


def devices_of(node: Node, gpu: int) -> dict[str, dict[str, Any]]:
    parents = {
        device["attributes"]["uuid"]["string"]: device
        for device in node.devices()
        if "uuid" in device["attributes"]
    }
    [uuid] = [key for key, device in parents.items() if device["attributes"]["index"]["int"] == gpu]
    return {
        device["name"]: device
        for device in node.devices()
        if device["attributes"].get("parentUUID", device["attributes"].get("uuid"))["string"] == uuid
    }


def named(node: Node, profile: str, start: int, gpu: int = 0) -> str:
    [name] = [
        name
        for name, device in devices_of(node, gpu).items()
        if device["attributes"].get("profile") == {"string": profile} and name.endswith(f"-{start}")
    ]
    return name


def specs(node: Node) -> list[dict[str, Any]]:
    return [yaml.load(path.read_text(), Loader=yaml.CSafeLoader) for path in sorted(node.cdi.glob("k8s.*"))]


@pytest.fixture(scope="module")
def directory_of_nodes() -> str:
    """On the disk: MPS daemons have a /dev/shm of their own."""
    return "/tmp"


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node().running(8 * PER_GPU, dynamic_mig=True)


def gpus(node: Node) -> list[Any]:
    """The simulated GPUs."""
    return [node.machine.gpu(number) for number in range(8)]


def clean(node: Node) -> bool:
    return not any(gpu.instances or gpu.mig_mode for gpu in gpus(node))


def test_a_device_is_made_and_destroyed(node: Node) -> None:
    published = node.slices()
    name = named(node, "2g.20gb", 2)
    ref = node.allocated_by_hand("one", name)
    outcome = node.ready(ref)
    [gpu] = [gpu for gpu in gpus(node) if gpu.instances]
    [instance] = gpu.instances
    assert (instance.profile_id, instance.start, len(instance.compute)) == (14, 2, 1)
    [spec] = specs(node)
    [device] = spec["devices"]
    paths = [entry["path"] for entry in device["containerEdits"]["deviceNodes"]]
    assert "/dev/nvidia0" in paths
    assert sum(path.startswith("/dev/nvidia-caps/") for path in paths) == 2
    assert node.ready(ref) == outcome
    node.must_unprepare(ref)
    assert clean(node)
    assert node.slices() == published
    for reason, kind, count in (
        ("MigDeviceCreated", "ResourceClaim", 1),
        ("MigDeviceDestroyed", "ResourceClaim", 1),
        ("MigModeChanged", "Node", 2),
    ):
        eventually(lambda reason=reason, count=count: len(node.events(reason)) == count)
        for event in node.events(reason):
            assert (event["involvedObject"]["kind"], event["type"]) == (kind, "Normal")
            assert re.search(r" in \d+\.\d", event["message"])
    assert not node.events("SchedulerOutdated")


def test_claims_share_a_device_that_is_made_on_demand(make_node: Callable[..., Node], tmp_path: Path) -> None:
    """The claim that created it ends first; the device and its daemon remain for the other one. The host has
    no capability nodes of the device until someone creates them.
    """
    body = read_yaml(MACHINES / "dgx-h100.yaml")
    machine = tmp_path / "without-nodes.yaml"
    machine.write_text(yaml.safe_dump({**body, "system": {"cap_nodes": False}}))
    sharing = share_all(SharingRule("memory", enforce="mps"))
    made = make_node(str(machine), minor=36)
    made.start_mps_host()
    made.running(8 * PER_GPU, dynamic_mig=True, sharing=sharing)
    name = named(made, "2g.20gb", 2)
    refs = [made.share_by_hand(number, name) for number in (1, 2)]
    outcomes = [made.ready(ref) for ref in refs]
    [instance] = made.machine.gpu(0).instances
    for number, ref in enumerate(refs, 1):
        [edits] = [
            spec["devices"][0]["containerEdits"] for spec in specs(made) if ref.uid in json.dumps(spec)
        ]
        assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={number * 1024}M" in edits["env"]
    [pid] = Path(mps_layout(made.plugin_dir).directories(name).pipe).glob("*.pid")
    daemon = pid.read_text()
    client = subprocess.run(
        [made.machine.host_root / "usr/bin/mps-client"],
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pid.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert client.stdout.splitlines()[:2] == ["mps=connected", f"device={instance.compute[0].uuid}"]
    made.must_unprepare(refs[0])
    assert made.ready(refs[1]) == outcomes[1]
    assert (made.machine.gpu(0).instances[0].compute[0].uuid, pid.read_text()) == (
        instance.compute[0].uuid,
        daemon,
    )
    made.must_unprepare(refs[1])
    assert not pid.exists()
    assert clean(made)
    [event] = eventually(lambda: made.events("SchedulerOutdated"))
    assert event["involvedObject"]["name"] == NODE
    assert "ignores the counters that shared devices use" in event["message"]
    assert made.driver is not None
    assert (made.driver.node_problems.codes(), made.driver.problems()) == (
        ["scheduler-outdated"],
        [event["message"]],
    )


def test_creation_that_is_refused_is_retried_and_reported_if_that_lasts(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "WaitTimeouts", partial(WaitTimeouts, retry_s=0.05))
    node = make_node().running(8 * PER_GPU, dynamic_mig=True)
    refused = "nvmlGpuInstanceCreateComputeInstance"
    node.machine.set_fault(refused, code="insufficient-resources", count=1)
    healed = node.allocated_by_hand("healed", named(node, "1g.10gb", 0))
    node.ready(healed)
    assert errors_of(node) == (1, 0)
    node.machine.set_fault(refused, code="insufficient-resources")
    late = node.allocated_by_hand("late", named(node, "1g.10gb", 1))
    answer = node.kubelet.prepare(DRIVER, [late], timeout_s=9.0)[late.uid]
    assert re.search("create a compute instance .*; waited [0-9]+ s", str(answer))
    assert len(node.machine.gpu(0).instances) == 1
    for event in eventually(lambda: node.events("PrepareFailed")):
        assert re.search("claim default/late .*create a compute instance .*; waited", event["message"])
    creations, prepares = errors_of(node)
    assert creations > prepares + 1
    assert prepares == 1
    node.machine.clear_faults()
    node.ready(late)
    assert node.unprepare(healed, late) == {healed.uid: None, late.uid: None}
    assert clean(node)


def errors_of(node: Node) -> tuple[float, float]:
    """How many creations of MIG devices failed, and how many Prepares."""
    creations = by_label(node.driver.metrics, "nvidia_dra_mig_errors_total", "operation", "error_type")
    prepares = by_label(node.driver.metrics, "nvidia_dra_node_prepare_errors_total", "error_type")
    return creations["create", "busy"], prepares["busy",]


def test_device_is_destroyed_though_nvml_is_being_initialised_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU is added during that."""
    ref = node.allocated_by_hand("one", named(node, "1g.10gb", 0))
    node.ready(ref)
    initialise, begun, gate, waits = NvmlSession._open, Event(), Event(), Event()

    def slowly(session: NvmlSession) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)
        initialise(session)

    def patience(what: str, at_most: float) -> float:
        waits.set()
        return at_most

    monkeypatch.setattr(NvmlSession, "_open", slowly)
    monkeypatch.setattr(mode, "seconds_for", patience)
    function = node.machine.host_root / "sys/bus/pci/devices/0000:ff:00.0"
    function.mkdir()
    (function / "vendor").write_text("0x10de\n")
    assert begun.wait(PATIENCE_S)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(node.unprepare, ref)
        assert waits.wait(PATIENCE_S)
        assert node.machine.gpu(0).instances
        gate.set()
        assert answer.result(PATIENCE_S) == {ref.uid: None}
    assert clean(node)


def test_mode_is_switched_next_to_a_process_that_stands_by(make_node: Callable[..., Node]) -> None:
    """It has NVML open too, so it is a client of every GPU."""
    node = make_node()
    node.running(8 * PER_GPU, dynamic_mig=True, pod_uid="older")
    node.stand_by(DYNAMIC_MIG="true")
    eventually(lambda: len(node.machine.clients(with_own=True)) == 2)
    ref = node.allocated_by_hand("one", named(node, "1g.10gb", 0))
    node.ready(ref)
    eventually(lambda: len(node.machine.clients(with_own=True)) == 2)
    node.must_unprepare(ref)
    eventually(lambda: clean(node))  # an Unprepare answers after 8 s at the latest


def test_command_destroys_a_mig_device_where_no_daemon_runs(node: Node) -> None:
    """A process keeps the device after its claim has ended, and no plugin works when the process exits."""
    assert node.driver.cleaner.runner.runners.keys() == set(STEPS), "each kind of step has what does it"
    gpu = node.machine.gpu(4)
    ref = node.allocated_by_hand("part", named(node, "1g.10gb", 0, gpu=4))
    node.ready(ref)
    [instance] = node.machine.gpu(4).instances
    node.machine.hold_gpu(gpu.uuid, 4711, "python3", gpu_instance=instance.id)
    node.must_unprepare(ref)
    node.driver.stop()
    command = ["cleanup", "--now", "--cdi-root", node.settings.cdi_root, *node.machine_flags]
    busy = call(*command)
    assert (busy.returncode, "python3" in busy.stdout) == (1, True), f"{busy.stdout} {busy.stderr}"
    node.machine.release_gpu(gpu.uuid)
    done = call(*command)
    assert (done.returncode, done.stdout) == (0, "no pending cleanup found\n"), f"{done.stdout} {done.stderr}"
    assert (node.machine.gpu(4).instances, node.machine.gpu(4).mig_mode) == ([], 0)
