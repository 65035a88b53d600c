"""Several workloads on one GPU: time slices, MPS with limits, and shares of independent claims."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dra_driver.model.claim import ClaimRef
from dra_driver.model.sharing import SharingRule, share_all
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, parameters, result, sliced

Json = dict[str, Any]


MPS = parameters(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 25})


def edits(node: Node, ref: ClaimRef) -> list[Json]:
    """The container edits of each device in the claim's CDI spec."""
    file = next(node.cdi.glob(f"*{ref.uid}*"))
    return [device["containerEdits"] for device in json.loads(file.read_text())["devices"]]


def environment(edit: Json) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in edit.get("env", []))


@pytest.fixture(scope="module")
def directory_of_nodes() -> str:
    """On the disk: MPS daemons have a /dev/shm of their own."""
    return "/tmp"


@pytest.fixture
def shared(make_node: Callable[..., Node]) -> Iterator[Callable[..., Node]]:
    """A node whose devices are shared by a rule, and its MPS host; no daemon outlives the test."""
    nodes: list[Node] = []

    def make(rule: SharingRule | None = None, machine: str = "dgx-h100", count: int = 8) -> Node:
        policy = {} if rule is None else {"sharing": share_all(rule)}
        node = make_node(machine)
        node.start_mps_host()
        node.running(count, **policy)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.must_unprepare(*node.recorded())


def snapshot(node: Node) -> dict[str, bytes]:
    """Everything below the plugin's directory and the GPUs' settings, without locks and logs of hosts."""
    files = {
        str(path.relative_to(node.root)): _content(path) if path.is_file() else b"directory"
        for top in (node.plugin_dir, node.cdi)
        for path in sorted(top.rglob("*"))
        if path.parent.name != "locks"
        and "host." not in str(path)
        and path.name != "mps"
        and not any(name in path.name for name in ("health.json", "problems.json", "receipts.json"))
    }
    processes = {
        f"process {file.parent.name}": b""
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if str(node.root).encode() in _content(file) and b"nvidia-cuda-mps" in _content(file)
    }
    settings = {
        f"gpu {index}": f"{node.machine.timeslice(index)} {node.machine.compute_mode(gpu.uuid)}".encode()
        for index, gpu in enumerate(node.machine.current().present)
    }
    return files | processes | settings


def _settled(node: Node) -> dict[str, bytes] | None:
    """Return the snapshot; None if something is removed during the read."""
    try:
        return snapshot(node)
    except FileNotFoundError:
        return None


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_containers_are_right_when_each_uses_one_request_of_a_mix(shared: Callable[..., Node]) -> None:
    """A container that names the request with MPS gets the daemon, one that names the other gets none of it. The claim
    says that they must name them."""
    node = shared()
    names = [device["name"] for device in node.devices()[:2]]
    config = [{**entry, "requests": ["shared"]} for entry in parameters(strategy="MPS")]
    ref = node.allocated_by_hand("mix", result(names[0], "shared"), result(names[1], "plain"), config=config)
    prepared = node.ready(ref)
    [file] = node.cdi.glob(f"*{ref.uid}*")
    spec = json.loads(file.read_text())
    by_id = {f"{spec['kind']}={device['name']}": device["containerEdits"] for device in spec["devices"]}

    def container(*requests: str) -> Json:
        """Return what the runtime makes of the kubelet's devices for a container with these requests."""
        found = [by_id[one.cdi_ids[0]] for one in prepared.devices if set(one.requests) & set(requests)]
        return {
            "nodes": [
                item["path"] for edit in found for item in edit["deviceNodes"] if "dri" not in item["path"]
            ],
            "env": {key: value for edit in found for key, value in environment(edit).items()},
            "mounts": [item["containerPath"] for edit in found for item in edit.get("mounts", [])],
        }

    pipe = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}
    assert container("shared") == {
        "nodes": ["/dev/nvidia0"], "env": pipe, "mounts": ["/tmp/nvidia-mps", "/dev/shm"],
    }  # fmt: skip
    assert container("plain") == {"nodes": ["/dev/nvidia1"], "env": {}, "mounts": []}
    both = container("shared", "plain")
    assert (both["nodes"], both["env"]) == (["/dev/nvidia0", "/dev/nvidia1"], pipe), "CUDA sees GPU 0 only"
    [event] = eventually(lambda: node.events("MpsNeedsRequestNames"))
    assert (event["type"], event["involvedObject"]["name"]) == ("Normal", "mix")
    assert f"shared ({names[0]}), and plain without MPS" in event["message"]


def client(node: Node, edit: Json, device: str) -> list[str]:
    """What a CUDA process of a container with these edits gets; `device` is the daemon's."""
    pipe = node.plugin_dir / "mps" / device / "pipe"
    assert next(
        one["hostPath"] for one in edit["mounts"] if one["containerPath"] == "/tmp/nvidia-mps"
    ) == str(pipe)
    done = subprocess.run(
        [node.machine.host_root / "usr/bin/mps-client"],
        env={**os.environ, **environment(edit), "CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()


def modes(node: Node, count: int) -> list[int]:
    return [node.machine.compute_mode(node.machine.gpu(index).uuid) for index in range(count)]


def by_uuid(node: Node, count: int) -> list[tuple[str, str]]:
    """(UUID, device name) of the first GPUs, in the order of a daemon."""
    rows = [(one["attributes"]["uuid"]["string"], one["name"]) for one in node.devices()[:count]]
    return sorted(rows)


def test_gpus_of_one_request_have_one_daemon(shared: Callable[..., Node]) -> None:
    """As NVIDIA's driver does it: containers see all of them through it, each with its own limit."""
    node = shared()
    before = snapshot(node)
    rows = by_uuid(node, 3)
    names = [name for _, name in rows]
    limits = {
        "defaultPinnedDeviceMemoryLimit": "4Gi",
        "defaultPerDevicePinnedMemoryLimit": {rows[2][0]: "2Gi"},
    }
    config = parameters(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 25, **limits})
    ref = node.allocated_by_hand("mps", *reversed(names), config=config)
    outcome = node.ready(ref)
    assert modes(node, 4) == [3, 3, 3, 0]
    assert [len(list(node.plugin_dir.glob(f"mps/{name}/pipe/*.pid"))) for name in names] == [1, 0, 0]
    for edit in edits(node, ref):
        assert environment(edit) == {
            "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M,1=4096M,2=2048M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }
        assert client(node, edit, names[0]) == [
            "mps=connected",
            f"device={','.join(uuid for uuid, _ in rows)}",
            "active_thread_percentage=25",
            "pinned_device_mem_limit=0=4096M,1=4096M,2=2048M",
        ]
    [pid] = (node.plugin_dir / "mps" / names[0] / "pipe").glob("*.pid")
    daemon = pid.read_text()
    node.restart_driver()
    assert node.ready(ref) == outcome
    assert pid.read_text() == daemon
    node.must_unprepare(ref)
    assert snapshot(node) == before
    undone = {"driver": "gpu.nvidia.com", "step": "run_mps", "action": "undo"}
    assert (
        node.driver.metrics.registry.get_sample_value("nvidia_dra_step_duration_seconds_count", undone) == 1.0
    )


def test_running_claims_keep_what_they_got_when_the_policy_changes(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    refs = [node.claim(f"part-{number}") for number in range(2)]
    outcomes = [node.ready(ref) for ref in refs]
    device = outcomes[0].devices[0].device
    [pid] = (node.plugin_dir / "mps" / device / "pipe").glob("*.pid")
    before, spec = pid.read_text(), edits(node, refs[0])
    for rule in (SharingRule("shares", 8, enforce="mps"), SharingRule("shares", 4)):
        node.restart_driver(sharing=share_all(rule))
        assert [node.ready(ref) for ref in refs] == outcomes
        assert pid.read_text() == before, "no daemon restarts under a running pod"
        assert edits(node, refs[0]) == spec


def test_daemon_stays_while_a_claim_with_an_unreadable_record_uses_it(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    before = snapshot(node)
    first, second = node.claim("first"), node.claim("second")
    device = node.ready(first).devices[0].device
    node.ready(second)
    record = node.plugin_dir / "claims" / f"{first.uid}.json"
    record.write_text("broken")
    node.restart_driver(sharing=share_all(SharingRule("shares", 4, enforce="mps")))
    node.must_unprepare(second)
    assert list((node.plugin_dir / "mps" / device / "pipe").glob("*.pid")), "the first claim's pod uses it"
    node.must_unprepare(first)
    assert not (node.plugin_dir / "mps" / device).exists()
    for aside in (node.plugin_dir / "claims").glob("*.unreadable-*"):
        aside.unlink()
    assert snapshot(node) == before


# --- time slices -----------------------------------------------------------------------------------


def test_time_slice_is_set_and_reset_and_set_again_after_a_driver_reload(shared: Callable[..., Node]) -> None:
    """Also after one while the plugin was down."""
    node = shared()
    before = snapshot(node)
    ref = node.allocated_by_hand("sliced", node.devices()[2]["name"], config=sliced("Long"))
    node.ready(ref)
    assert [node.machine.timeslice(index) for index in range(4)] == [0, 0, 3, 0]
    node.reload_nvidia_driver()
    eventually(lambda: node.machine.timeslice(2) == 3)
    node.driver.stop()
    node.machine.unload_driver()
    node.machine.load_driver()
    node.start_driver()
    eventually(lambda: node.machine.timeslice(2) == 3)
    node.must_unprepare(ref)
    eventually(lambda: _settled(node) == before)
