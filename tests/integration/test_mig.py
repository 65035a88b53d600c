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

from dra_driver.app import daemon
from dra_driver.app.wiring import mig as migparts
from dra_driver.claims.waiting_line import WaitTimeouts
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.nvml.session import NvmlSession
from dra_driver.simulator.catalogue import MACHINES
from dra_driver.slices import api_support as partitionsupport
from tests.fakes.scrapes import by_label
from tests.integration.conftest import NODE, Node, eventually

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
    return [yaml.load(path.read_text(), Loader=yaml.CSafeLoader) for path in sorted(node.cdi.glob("*.json"))]


@pytest.fixture(scope="module")
def directory_of_nodes() -> None:
    """On the disk: MPS daemons have a /dev/shm of their own."""


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    made = make_node()
    made.start_driver(dynamic_mig=True)
    eventually(lambda: len(made.devices()) == 8 * PER_GPU)
    return made


def gpus(node: Node) -> list[Any]:
    """The simulated GPUs."""
    return [node.machine.gpu(number) for number in range(8)]


def clean(node: Node) -> bool:
    return not any(gpu.instances or gpu.mig_mode for gpu in gpus(node))


def test_a_device_is_made_and_destroyed(node: Node) -> None:
    published = node.slices()
    name = named(node, "2g.20gb", 2)
    ref = node.allocated_by_hand("one", name)
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Prepared)
    [gpu] = [gpu for gpu in gpus(node) if gpu.instances]
    [instance] = gpu.instances
    assert (instance.profile_id, instance.start, len(instance.compute)) == (14, 2, 1)
    [spec] = specs(node)
    [device] = spec["devices"]
    paths = [entry["path"] for entry in device["containerEdits"]["deviceNodes"]]
    assert "/dev/nvidia0" in paths
    assert sum(path.startswith("/dev/nvidia-caps/") for path in paths) == 2
    assert node.prepare(ref)[ref.uid] == outcome
    assert node.unprepare(ref) == {ref.uid: None}
    assert clean(node)
    assert node.slices() == published


def test_overlapping_claims_are_refused_and_neighbours_are_not(node: Node) -> None:
    first = node.allocated_by_hand("first", named(node, "3g.40gb", 4))
    assert isinstance(node.prepare(first)[first.uid], Prepared)
    clash = node.allocated_by_hand("clash", named(node, "1g.10gb", 5))
    failed = node.prepare(clash)[clash.uid]
    assert isinstance(failed, Failed)
    assert "is held by claim default/first" in failed.error
    beside = node.allocated_by_hand("beside", named(node, "1g.10gb", 3))
    assert isinstance(node.prepare(beside)[beside.uid], Prepared)
    for ref in (first, clash, beside):
        assert node.unprepare(ref) == {ref.uid: None}
    assert clean(node)


def test_whole_gpu_comes_back_out_of_mig_mode(node: Node) -> None:
    ref = node.allocated_by_hand("part", named(node, "1g.10gb", 0))
    node.prepare(ref)
    [whole] = [
        name
        for name, device in devices_of(node, 0).items()
        if device["attributes"]["type"] == {"string": "gpu"}
    ]
    other = node.allocated_by_hand("whole", whole)
    assert isinstance(node.prepare(other)[other.uid], Failed)
    assert node.unprepare(ref) == {ref.uid: None}
    assert isinstance(node.prepare(other)[other.uid], Prepared)
    assert node.unprepare(other) == {other.uid: None}


def test_instances_made_by_hand_are_withheld_and_offered_no_more(node: Node) -> None:
    node.machine.set_mig_mode(3, True)
    instance, *_ = node.machine.create_mig(3, "3g.40gb", 0)
    eventually(lambda: len(node.devices()) < 8 * PER_GPU)
    eventually(lambda: not [one for one in node.devices() if one["attributes"].get("index") == {"int": 3}])

    def places() -> set[str]:
        """The last part of the names of the GPU's MIG devices: the first memory slice."""
        devices = [one for one in node.devices() if one["attributes"].get("parentIndex") == {"int": 3}]
        return {one["name"].rpartition("-")[2] for one in devices}

    # The driver may look between the change of the mode and the making of the instance.
    eventually(lambda: places() and not places() & {"0", "1", "2", "3"})
    node.machine.destroy_mig(3, instance)
    node.machine.set_mig_mode(3, False)
    eventually(lambda: len(node.devices()) == 8 * PER_GPU)


def test_restart_clears_away_what_no_claim_holds(node: Node, make_node: Callable[..., Node]) -> None:
    kept = node.allocated_by_hand("kept", named(node, "1g.10gb", 0))
    lost = node.allocated_by_hand("lost", named(node, "1g.10gb", 1))
    for ref in (kept, lost):
        node.prepare(ref)
    node.driver.stop()
    node.driver.records.delete(lost.uid)
    next(path for path in node.cdi.glob(f"*{lost.uid}*")).unlink()
    node.start_driver(dynamic_mig=True)
    eventually(lambda: sum(len(gpu.instances) for gpu in gpus(node)) == 1)
    assert isinstance(node.prepare(kept)[kept.uid], Prepared)
    assert node.unprepare(kept) == {kept.uid: None}
    eventually(lambda: clean(node))


def test_switching_it_off_keeps_running_devices(node: Node) -> None:
    ref = node.allocated_by_hand("runs", named(node, "1g.10gb", 0))
    before = node.prepare(ref)[ref.uid]
    node.driver.stop()
    node.start_driver(dynamic_mig=False)
    eventually(lambda: 0 < len(node.devices()) < 10)
    assert node.prepare(ref)[ref.uid] == before
    assert node.unprepare(ref) == {ref.uid: None}
    assert clean(node)


def test_server_without_counters_gets_whole_gpus_only(make_node: Callable[..., Node]) -> None:
    made = make_node()
    made.server.gates["DRAPartitionableDevices"] = False
    made.start_driver(dynamic_mig=True)
    devices = made.wait_devices(8)
    assert not [one for one in devices if "consumesCounters" in one]
    assert all(entry["spec"]["nodeName"] == NODE for entry in made.slices())


def test_server_that_counts_later_gets_everything(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitionsupport, "_ASK_AGAIN_S", 0.05)
    made = make_node()
    made.server.gates["DRAPartitionableDevices"] = False
    driver = made.start_driver(dynamic_mig=True)
    made.wait_devices(8)
    assert driver.publishing.publisher.wait_published(10)
    made.server.gates["DRAPartitionableDevices"] = True
    made.wait_devices(8 * PER_GPU)


def failure(node: Node, ref: ClaimRef) -> str:
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Failed)
    return outcome.error


def test_orphan_of_ours_is_cleared_by_the_next_claim_of_its_place(node: Node) -> None:
    """The scheduler chose before the slices were without what the orphan is in the way of."""
    names = [named(node, "1g.10gb", 2), named(node, "2g.20gb", 2), *list(devices_of(node, 0))[-1:]]
    first = node.allocated_by_hand("first", names[0])
    assert isinstance(node.prepare(first)[first.uid], Prepared)
    node.machine.set_fault("nvmlGpuInstanceDestroy", code="gpu-is-lost")
    assert node.unprepare(first) == {first.uid: None}
    eventually(lambda: names[0] not in {device["name"] for device in node.devices()})
    for number, name in enumerate(names):
        ref = node.allocated_by_hand(f"next-{number}", name)
        assert "destroy GPU instance" in failure(node, ref)
    node.machine.clear_faults()
    ref = node.allocated_by_hand("last", names[1])
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    assert [(instance.profile_id, instance.start) for instance in node.machine.gpu(0).instances] == [(14, 2)]
    assert node.unprepare(ref) == {ref.uid: None}
    eventually(lambda: clean(node))
    eventually(lambda: len(node.devices()) == 8 * PER_GPU)


def test_claims_share_a_device_that_is_made_on_demand(make_node: Callable[..., Node], tmp_path: Path) -> None:
    """The claim that made it goes first; the device and its daemon stay for the other one. The host has no nodes of
    the device's capabilities until somebody makes them."""
    body = yaml.safe_load((MACHINES / "dgx-h100.yaml").read_text())
    machine = tmp_path / "without-nodes.yaml"
    machine.write_text(yaml.safe_dump({**body, "system": {"cap_nodes": False}}))
    made = make_node(str(machine))
    made.start_driver(
        dynamic_mig=True, mps_host="child", sharing=share_all(SharingRule("memory", enforce="mps"))
    )
    eventually(lambda: len(made.devices()) == 8 * PER_GPU)
    name = named(made, "2g.20gb", 2)
    refs = [
        made.allocated_by_hand(
            f"share-{number}",
            name,
            shareID=f"11111111-1111-1111-1111-11111111111{number}",
            consumedCapacity={"memory": f"{number}Gi"},
        )
        for number in (1, 2)
    ]
    outcomes = [made.prepare(ref)[ref.uid] for ref in refs]
    assert all(isinstance(outcome, Prepared) for outcome in outcomes)
    [instance] = made.machine.gpu(0).instances
    for number, ref in enumerate(refs, 1):
        [edits] = [
            spec["devices"][0]["containerEdits"] for spec in specs(made) if ref.uid in json.dumps(spec)
        ]
        assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={number * 1024}M" in edits["env"]
    [pid] = (made.plugin_dir / "mps" / name / "pipe").glob("*.pid")
    daemon = pid.read_text()
    client = subprocess.run(
        [made.machine.host_root / "usr/bin/mps-client"],
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pid.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert client.stdout.splitlines()[:2] == ["mps=connected", f"device={instance.compute[0].uuid}"]
    assert made.unprepare(refs[0]) == {refs[0].uid: None}
    assert made.prepare(refs[1])[refs[1].uid] == outcomes[1]
    assert (made.machine.gpu(0).instances[0].compute[0].uuid, pid.read_text()) == (
        instance.compute[0].uuid,
        daemon,
    )
    assert made.unprepare(refs[1]) == {refs[1].uid: None}
    assert not pid.exists()
    assert clean(made)
    events = eventually(lambda: told(made, "SchedulerOutdated"))
    assert [event["involvedObject"]["name"] for event in events] == [NODE]
    assert "forgets what shared devices take" in events[0]["message"]


def told(node: Node, reason: str) -> list[dict[str, Any]]:
    return [event for event in node.server.objects("events", group="") if event["reason"] == reason]


def test_users_are_told_what_was_made_and_switched(node: Node) -> None:
    ref = node.allocated_by_hand("told", named(node, "1g.10gb", 0))
    node.prepare(ref)
    assert node.unprepare(ref) == {ref.uid: None}
    for reason, kind, count in (
        ("MigDeviceCreated", "ResourceClaim", 1),
        ("MigDeviceDestroyed", "ResourceClaim", 1),
        ("MigModeChanged", "Node", 2),
    ):
        events = eventually(
            lambda reason=reason, count=count: told(node, reason)[count - 1 :] and told(node, reason)
        )
        assert [(event["involvedObject"]["kind"], event["type"]) for event in events] == [
            (kind, "Normal")
        ] * count
        assert all(re.search(r" in \d+\.\d", event["message"]) for event in events)
    assert not told(node, "SchedulerOutdated")


def test_creation_that_is_refused_is_tried_again_and_told_if_that_lasts(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = partial(WaitTimeouts, refused_pause_s=0.01, refused_pause_most_s=0.01, refused_s=0.3)
    monkeypatch.setattr(daemon, "WaitTimeouts", quick)
    node = make_node()
    node.start_driver(dynamic_mig=True)
    eventually(lambda: len(node.devices()) == 8 * PER_GPU)
    refused = "nvmlGpuInstanceCreateComputeInstance"
    node.machine.set_fault(refused, code="insufficient-resources", count=1)
    healed = node.allocated_by_hand("healed", named(node, "1g.10gb", 0))
    assert isinstance(node.prepare(healed)[healed.uid], Prepared)
    assert errors_of(node) == (1, 0)
    node.machine.set_fault(refused, code="insufficient-resources")
    late = node.allocated_by_hand("late", named(node, "1g.10gb", 1))
    assert re.search("create a compute instance .*; refused [0-9]+ times in ", failure(node, late))
    assert len(node.machine.gpu(0).instances) == 1
    for event in eventually(lambda: told(node, "PrepareFailed")):
        assert re.search("claim default/late .*create a compute instance .*; refused", event["message"])
    creations, prepares = errors_of(node)
    assert creations > prepares + 1
    assert prepares == 1
    node.machine.clear_faults()
    assert isinstance(node.prepare(late)[late.uid], Prepared)
    assert node.unprepare(healed, late) == {healed.uid: None, late.uid: None}
    assert clean(node)


def errors_of(node: Node) -> tuple[float, float]:
    """How many creations of MIG devices failed, and how many Prepares."""
    creations = by_label(node.driver.metrics, "nvidia_dra_mig_errors_total", "operation", "error_type")
    prepares = by_label(node.driver.metrics, "nvidia_dra_node_prepare_errors_total", "error_type")
    return creations["create", "busy"], prepares["busy",]


def test_device_is_destroyed_though_nvml_is_being_initialised_anew(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU is plugged in meanwhile; that is no time to adopt what others made."""
    reconciled, looked = [], []
    monkeypatch.setattr(node.driver.mig.collector, "reconcile", reconciled.append)
    monkeypatch.setattr(node.driver.mig.collector, "look_soon", lambda: looked.append(1))
    ref = node.allocated_by_hand("one", named(node, "1g.10gb", 0))
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    initialise, begun, gate, waits = NvmlSession._open, Event(), Event(), Event()

    def slowly(session: NvmlSession) -> None:
        begun.set()
        assert gate.wait(10)
        initialise(session)

    def patience(what: str, at_most: float) -> float:
        waits.set()
        return at_most

    monkeypatch.setattr(NvmlSession, "_open", slowly)
    monkeypatch.setattr(migparts, "seconds_for", patience)
    function = node.machine.host_root / "sys/bus/pci/devices/0000:ff:00.0"
    function.mkdir()
    (function / "vendor").write_text("0x10de\n")
    assert begun.wait(10)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(node.unprepare, ref)
        assert waits.wait(10)
        assert node.machine.gpu(0).instances
        gate.set()
        assert answer.result(10) == {ref.uid: None}
    assert clean(node)
    eventually(lambda: looked)
    assert reconciled == []
