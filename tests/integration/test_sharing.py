"""Several workloads on one GPU: time slices, MPS with limits, and shares of independent claims."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dra_driver.model.claim import ClaimRef, Failed, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.fakes.mps_behaviour import behave, misbehave
from tests.integration.conftest import NODE, Node, eventually

Json = dict[str, Any]


def parameters(kind: str = "GpuConfig", **sharing: Any) -> list[Json]:
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing}
    return [{"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": body}}]


def edits(node: Node, ref: ClaimRef) -> list[Json]:
    """The container edits of each device in the claim's CDI spec."""
    file = next(node.cdi.glob(f"*{ref.uid}*"))
    return [device["containerEdits"] for device in json.loads(file.read_text())["devices"]]


def environment(edit: Json) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in edit.get("env", []))


def error(node: Node, ref: ClaimRef) -> str:
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Failed), outcome
    return outcome.error


def ready(node: Node, ref: ClaimRef) -> Prepared:
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Prepared), outcome
    return outcome


@pytest.fixture(scope="module")
def directory_of_nodes() -> None:
    """On the disk: MPS daemons have a /dev/shm of their own."""


@pytest.fixture
def shared(make_node: Callable[..., Node]) -> Iterator[Callable[..., Node]]:
    """A node whose devices are shared by a rule, with its MPS host as a child; no daemon outlives the test."""
    nodes: list[Node] = []

    def make(rule: SharingRule | None = None, machine: str = "dgx-h100", count: int = 8) -> Node:
        node = make_node(machine)
        policy = {} if rule is None else {"sharing": share_all(rule)}
        node.start_driver(mps_host="child", **policy)
        node.wait_devices(count)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        refs = [ClaimRef("default", "any", name.removesuffix(".json")) for name in node.records()]
        assert all(outcome is None for outcome in node.unprepare(*refs).values())


def snapshot(node: Node) -> dict[str, bytes]:
    """Everything below the plugin's directory and the GPUs' settings, without locks and logs of hosts."""
    files = {
        str(path.relative_to(node.root)): _content(path) if path.is_file() else b"directory"
        for top in (node.plugin_dir, node.cdi)
        for path in sorted(top.rglob("*"))
        if path.parent.name not in ("locks", "publishers")
        and "host." not in str(path)
        and path.name not in ("mps", "publishers")
        and "health.json" not in path.name
    }
    processes = {
        f"process {file.parent.name}": b""
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if str(node.root).encode() in _content(file) and b"nvidia-cuda-mps" in _content(file)
    }
    settings = {
        f"gpu {index}": f"{node.machine.timeslice(index)} {node.machine.compute_mode(row['uuid'])}".encode()
        for index, row in enumerate(node.machine.describe())
    }
    return files | processes | settings


def _settled(node: Node) -> dict[str, bytes] | None:
    """The snapshot; None while something goes away under the look."""
    try:
        return snapshot(node)
    except FileNotFoundError:
        return None


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_time_slice_is_set_and_reset(shared: Callable[..., Node]) -> None:
    node = shared()
    before = snapshot(node)
    device = node.devices()[2]
    config = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
    ref = node.allocated_by_hand("sliced", device["name"], config=config)
    ready(node, ref)
    assert node.machine.timeslice(2) == 3
    assert [node.machine.timeslice(index) for index in (0, 1, 3)] == [0, 0, 0]
    assert node.unprepare(ref) == {ref.uid: None}
    assert snapshot(node) == before


def test_plain_claim_touches_no_setting(shared: Callable[..., Node]) -> None:
    node = shared()
    calls = node.root / "calls"
    smi = node.machine.host_root / "usr/bin/nvidia-smi"
    smi.unlink()
    smi.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    smi.chmod(0o755)
    plain = node.claim("plain")
    ready(node, plain)
    assert node.unprepare(plain) == {plain.uid: None}
    assert not calls.exists()
    config = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Short"})
    ready(node, node.allocated_by_hand("asking", node.devices()[0]["name"], config=config))
    assert "--set-timeslice 1" in calls.read_text()


def test_mps_claim_gets_a_daemon_and_its_limits(shared: Callable[..., Node]) -> None:
    node = shared()
    before = snapshot(node)
    uuid = node.devices()[0]["attributes"]["uuid"]["string"]
    mps = {
        "defaultActiveThreadPercentage": 25,
        "defaultPinnedDeviceMemoryLimit": "10Gi",
        "defaultPerDevicePinnedMemoryLimit": {uuid: "4Gi"},
    }
    ref = node.allocated_by_hand(
        "mps", node.devices()[0]["name"], config=parameters(strategy="MPS", mpsConfig=mps)
    )
    ready(node, ref)
    [edit] = edits(node, ref)
    assert environment(edit) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert {mount["containerPath"] for mount in edit["mounts"]} == {"/tmp/nvidia-mps", "/dev/shm"}
    assert node.machine.compute_mode(uuid) == 3
    assert node.unprepare(ref) == {ref.uid: None}
    assert snapshot(node) == before


def test_containers_are_right_when_each_uses_one_request_of_a_mix(shared: Callable[..., Node]) -> None:
    """A container that names the request with MPS gets the daemon, one that names the other gets none of it. The claim
    says that they must name them."""
    node = shared()
    names = [device["name"] for device in node.devices()[:2]]
    results = [
        {"request": request, "driver": "gpu.nvidia.com", "pool": NODE, "device": name}
        for request, name in zip(("shared", "plain"), names, strict=True)
    ]
    config = [{**entry, "requests": ["shared"]} for entry in parameters(strategy="MPS")]
    allocation = {"devices": {"results": results, "config": config}}
    ref = node.claim("mix", status={"allocation": allocation})
    prepared = ready(node, ref)
    [file] = node.cdi.glob(f"*{ref.uid}*")
    spec = json.loads(file.read_text())
    by_id = {f"{spec['kind']}={device['name']}": device["containerEdits"] for device in spec["devices"]}

    def container(*requests: str) -> Json:
        """What the runtime makes of the devices that the kubelet names for a container with these requests."""
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
    [event] = eventually(
        lambda: [
            event
            for event in node.server.objects("events", group="")
            if event["reason"] == "MpsNeedsRequestNames"
        ]
    )
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
    outcome = ready(node, ref)
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
            "pinned_device_mem_limit_mib=4096,4096,2048",
        ]
    assert node.driver is not None
    [pid] = (node.plugin_dir / "mps" / names[0] / "pipe").glob("*.pid")
    daemon = pid.read_text()
    node.driver.stop()
    node.start_driver(mps_host="child")
    assert ready(node, ref) == outcome
    assert pid.read_text() == daemon
    assert node.unprepare(ref) == {ref.uid: None}
    assert snapshot(node) == before


def one_daemon_each(node: Node, count: int) -> ClaimRef:
    """A claim whose requests get one GPU each, and so a daemon each."""
    results = [
        {"request": f"gpu-{number}", "driver": "gpu.nvidia.com", "pool": NODE, "device": device["name"]}
        for number, device in enumerate(node.devices()[:count])
    ]
    return node.claim("mps", status={"allocation": {"devices": {"results": results, "config": MPS}}})


@pytest.mark.parametrize("started", [0, 1])
def test_claim_of_several_daemons_is_prepared_and_ends_when_not_all_threads_start(
    shared: Callable[..., Node], threads_that_start: Callable[[str, int], None], started: int
) -> None:
    node = shared()
    before = snapshot(node)
    ref = one_daemon_each(node, 3)
    threads_that_start("side-by-side", started)
    ready(node, ref)
    assert modes(node, 4) == [3, 3, 3, 0]
    assert len(list(node.plugin_dir.glob("mps/*/pipe/*.pid"))) == 3
    threads_that_start("side-by-side", started)
    assert node.unprepare(ref) == {ref.uid: None}
    assert node.records() == []
    eventually(lambda: _settled(node) == before)


@pytest.mark.parametrize("started", [0, 1])
def test_claim_of_several_daemons_leaves_nothing_when_one_fails_and_not_all_threads_start(
    shared: Callable[..., Node], threads_that_start: Callable[[str, int], None], started: int
) -> None:
    node = shared()
    before = snapshot(node)
    ref = one_daemon_each(node, 3)
    root = node.machine.host_root
    misbehave(root, node.machine.gpu(0).uuid, fail_to_start="no")
    threads_that_start("side-by-side", started)
    assert "ended while it started" in error(node, ref)
    behave(root)
    assert (node.records(), snapshot(node)) == ([], before)


def test_claims_share_one_daemon_of_several_gpus(shared: Callable[..., Node]) -> None:
    rule = SharingRule("memory", enforce="mps")
    node = shared(rule)
    before = snapshot(node)
    names = [name for _, name in by_uuid(node, 2)]

    def both(number: int, *devices: str) -> ClaimRef:
        results = [
            {
                "request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": name,
                "shareID": f"{number}{place}111111-1111-1111-1111-111111111111",
                "consumedCapacity": {"memory": f"{number + place}Gi"},
            }
            for place, name in enumerate(devices)
        ]  # fmt: skip
        return node.claim(f"claim-{number}", status={"allocation": {"devices": {"results": results}}})

    first, second, alone = both(1, *names), both(3, *names), both(5, names[1])
    for ref in (first, second):
        ready(node, ref)
    limits = [client(node, edits(node, ref)[0], names[0])[-1] for ref in (first, second)]
    assert limits == [
        "pinned_device_mem_limit_mib=1024,2048",
        "pinned_device_mem_limit_mib=3072,4096",
    ]
    assert "one MPS daemon serves both, but device" in error(node, alone)
    assert node.unprepare(first) == {first.uid: None}
    assert modes(node, 2) == [3, 3], "the other claim uses it"
    assert client(node, edits(node, second)[0], names[0])[0] == "mps=connected"
    assert node.unprepare(second) == {second.uid: None}
    assert modes(node, 2) == [0, 0]
    ready(node, alone)
    assert node.unprepare(alone) == {alone.uid: None}
    assert snapshot(node) == before


def test_daemon_of_several_gpus_ends_when_the_record_of_its_claim_was_lost(
    shared: Callable[..., Node],
) -> None:
    """The claim's CDI spec tells of its devices, and the record of the daemon tells the rest."""
    node = shared()
    before = snapshot(node)
    names = [name for _, name in by_uuid(node, 2)]
    ref = node.allocated_by_hand("mps", *names, config=MPS)
    ready(node, ref)
    assert node.driver is not None
    node.driver.stop()
    [record] = (node.plugin_dir / "claims").glob("[!.]*.json")
    record.write_text("{")
    node.start_driver(mps_host="child")
    for number, name in enumerate(names):
        assert "is held by claim" in error(node, node.allocated_by_hand(f"next-{number}", name))
    assert node.unprepare(ref) == {ref.uid: None}
    now = snapshot(node)
    assert [key for key in now if key.startswith("process")] == []
    assert {key: now[key] for key in before if key.startswith("gpu ")} == {
        key: value for key, value in before.items() if key.startswith("gpu ")
    }


@pytest.mark.parametrize(
    ("mps", "word"),
    [
        ({"defaultPinnedDeviceMemoryLimit": "100Gi"}, "above the 81559Mi"),
        ({"defaultPinnedDeviceMemoryLimit": "1Ki"}, "1Mi"),
        ({"defaultActiveThreadPercentage": 0}, "1"),
        ({"defaultPerDevicePinnedMemoryLimit": {"GPU-00000000-0000": "1Gi"}}, "GPU-00000000-0000"),
        ({"defaultPerDevicePinnedMemoryLimit": {"3": "1Gi"}}, "names 3"),
    ],
)
def test_limits_that_cannot_be_are_refused(shared: Callable[..., Node], mps: Json, word: str) -> None:
    node = shared()
    ref = node.allocated_by_hand(
        "mps", node.devices()[0]["name"], config=parameters(strategy="MPS", mpsConfig=mps)
    )
    assert word in error(node, ref)
    assert node.records() == []


def test_multi_user_before_volta_is_refused_and_off_by_default(make_node: Callable[..., Node]) -> None:
    """Every card of the catalogue is Volta or newer, so the rule is looked at in planning alone."""
    from dra_driver.claims.rules.plan import plan_claim
    from dra_driver.errors import ClaimRefusedError
    from dra_driver.model.claim import AllocatedClaim, DeviceConfig, DeviceResult
    from dra_driver.model.gpu import Gpu
    from dra_driver.model.inventory import Inventory

    inventory = Inventory(gpus=(Gpu("GPU-1", product_name="Tesla P100", cuda_compute_capability=(6, 0)),))
    [name] = inventory.by_name
    for multi_user, allowed in ((None, True), (True, False)):
        config = DeviceConfig(
            "FromClaim",
            (),
            "gpu.nvidia.com",
            {
                "apiVersion": "resource.nvidia.com/v1beta1",
                "kind": "GpuConfig",
                "sharing": {"strategy": "MPS", "mpsConfig": {"multiUser": multi_user}},
            },
        )
        result = DeviceResult("gpu", "gpu.nvidia.com", "n", name)
        claim = AllocatedClaim(ClaimRef("d", "c", "uid"), (result,), (config,))
        if allowed:
            [step, _] = plan_claim(claim, inventory, "n", "gpu.nvidia.com", ()).steps
            assert step.spec.multi_user is False
        else:
            with pytest.raises(ClaimRefusedError, match="older than Volta"):
                plan_claim(claim, inventory, "n", "gpu.nvidia.com", ())


def share(node: Node, name: str, memory: str, namespace: str = "default") -> ClaimRef:
    request = {
        "deviceClassName": "gpu.nvidia.com",
        "capacity": {"requests": {"memory": memory}},
        "selectors": [
            {"cel": {"expression": f"device.attributes['gpu.nvidia.com'].uuid == '{first_uuid(node)}'"}}
        ],
    }
    return node.claim(name, {"requests": [{"name": "gpu", "exactly": request}]})


def first_uuid(node: Node) -> str:
    return node.devices()[0]["attributes"]["uuid"]["string"]


def test_independent_claims_share_one_gpu_by_memory_each_with_its_limit(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("memory", enforce="mps"))
    before = snapshot(node)
    refs = [share(node, f"part-{number}", "8Gi") for number in range(9)]
    outcomes = [ready(node, ref) for ref in refs]
    assert len({outcome.devices[0].device for outcome in outcomes}) == 1
    assert len({outcome.devices[0].share_id for outcome in outcomes}) == 9
    for ref in refs:
        [edit] = edits(node, ref)
        assert environment(edit)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    pipes = {edits(node, ref)[0]["mounts"][0]["hostPath"] for ref in refs}
    assert len(pipes) == 1, "one daemon for all"
    for ref in refs[:-1]:
        assert node.unprepare(ref) == {ref.uid: None}
        assert node.machine.compute_mode(first_uuid(node)) == 3, "the daemon stays with its last claim"
    assert node.unprepare(refs[-1]) == {refs[-1].uid: None}
    assert snapshot(node) == before


def test_equal_shares_split_memory_and_threads(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    ref = node.claim("quarter")
    ready(node, ref)
    [edit] = edits(node, ref)
    assert environment(edit)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={81559 // 4}M"
    assert environment(edit)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_shares_without_enforcement_need_no_daemon(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4))
    refs = [node.claim(f"part-{number}") for number in range(2)]
    for ref in refs:
        ready(node, ref)
        assert "env" not in edits(node, ref)[0]
    assert not (node.plugin_dir / "mps").exists()


def test_different_intervals_on_one_gpu_are_refused_and_the_first_is_named(
    shared: Callable[..., Node],
) -> None:
    node = shared(SharingRule("shares", 4))
    first, second, third = (
        node.claim(
            f"slice-{number}",
            {
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}],
                "config": [
                    {
                        "opaque": {
                            "driver": "gpu.nvidia.com",
                            "parameters": parameters(
                                strategy="TimeSlicing", timeSlicingConfig={"interval": interval}
                            )[0]["opaque"]["parameters"],
                        }
                    }
                ],
            },
        )
        for number, interval in enumerate(("Short", "Long", "Short"))
    )
    ready(node, first)
    text = error(node, second)
    assert "default/slice-0" in text
    assert "Short" in text
    assert "Long" in text
    ready(node, third)
    node.unprepare(first)
    assert node.machine.timeslice(0) == 1, "the third claim still wants it"
    node.unprepare(third)
    assert node.machine.timeslice(0) == 0
    ready(node, second)


def test_mps_and_time_slicing_do_not_share_a_gpu(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4))
    plain = node.claim("plain")
    ready(node, plain)
    mps = node.claim(
        "mps",
        {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}],
            "config": [
                {
                    "opaque": {
                        "driver": "gpu.nvidia.com",
                        "parameters": parameters(strategy="MPS")[0]["opaque"]["parameters"],
                    }
                }
            ],
        },
    )
    assert "MPS has the device to itself" in error(node, mps)
    assert node.unprepare(plain) == {plain.uid: None}
    ready(node, mps)


def test_shares_of_a_mig_device(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 2, enforce="mps"), machine="h100-mig-static", count=13)
    request = {"requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com"}}]}
    refs = [node.claim(f"half-{number}", request) for number in range(2)]
    outcomes = [ready(node, ref) for ref in refs]
    assert len({outcome.devices[0].device for outcome in outcomes}) == 1
    assert {environment(edits(node, ref)[0])["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for ref in refs} == {"50"}
    for ref in refs:
        assert node.unprepare(ref) == {ref.uid: None}


def test_restart_of_the_plugin_leaves_daemons_running(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    ref = node.claim("part")
    ready(node, ref)
    device = ready(node, ref).devices[0].device
    [pid] = (node.plugin_dir / "mps" / device / "pipe").glob("*.pid")
    daemon = pid.read_text()
    assert node.driver is not None
    node.driver.stop()
    node.start_driver(mps_host="child", sharing=share_all(SharingRule("shares", 4, enforce="mps")))
    ready(node, ref)
    assert pid.read_text() == daemon
    assert node.unprepare(ref) == {ref.uid: None}
    assert not pid.exists()


def test_time_slice_is_set_again_after_a_driver_reload(shared: Callable[..., Node]) -> None:
    node = shared()
    config = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Short"})
    ref = node.allocated_by_hand("sliced", node.devices()[1]["name"], config=config)
    ready(node, ref)
    node.machine.unload_driver()
    eventually(lambda: node.devices() == [])
    node.machine.load_driver()
    node.wait_devices(8)
    eventually(lambda: node.machine.timeslice(1) == 1)


def test_unsupported_time_slice_is_the_claims_error_only_if_it_asked(shared: Callable[..., Node]) -> None:
    node = shared()
    smi = node.machine.host_root / "usr/bin/nvidia-smi"
    smi.unlink()
    smi.write_text("#!/bin/sh\necho 'Setting timeslice is Not Supported on this GPU'; exit 3\n")
    smi.chmod(0o755)
    plain = node.claim("plain")
    ready(node, plain)
    config = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Short"})
    asking = node.allocated_by_hand("asking", node.devices()[5]["name"], config=config)
    assert "does not support it" in error(node, asking)
    assert node.records() == [f"{plain.uid}.json"]


def test_running_claims_keep_what_they_got_when_the_policy_changes(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    refs = [node.claim(f"part-{number}") for number in range(2)]
    outcomes = [ready(node, ref) for ref in refs]
    device = outcomes[0].devices[0].device
    [pid] = (node.plugin_dir / "mps" / device / "pipe").glob("*.pid")
    before, spec = pid.read_text(), edits(node, refs[0])
    for rule in (SharingRule("shares", 8, enforce="mps"), SharingRule("shares", 4)):
        assert node.driver is not None
        node.driver.stop()
        node.start_driver(mps_host="child", sharing=share_all(rule))
        assert [ready(node, ref) for ref in refs] == outcomes
        assert pid.read_text() == before, "no daemon restarts under a running pod"
        assert edits(node, refs[0]) == spec


def test_daemon_stays_while_a_claim_with_an_unreadable_record_uses_it(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    before = snapshot(node)
    first, second = node.claim("first"), node.claim("second")
    device = ready(node, first).devices[0].device
    ready(node, second)
    record = node.plugin_dir / "claims" / f"{first.uid}.json"
    record.write_text("broken")
    assert node.unprepare(second) == {second.uid: None}
    assert list((node.plugin_dir / "mps" / device / "pipe").glob("*.pid")), "the first claim's pod uses it"
    assert node.unprepare(first) == {first.uid: None}
    assert not (node.plugin_dir / "mps" / device).exists()
    for aside in (node.plugin_dir / "claims").glob("*.unreadable-*"):
        aside.unlink()
    assert snapshot(node) == before


def test_claim_without_an_interval_takes_the_one_that_is_set(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4))
    device = node.devices()[0]["name"]
    long = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
    ids = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(2)]
    first = node.allocated_by_hand("long", device, config=long, shareID=ids[0])
    second = node.allocated_by_hand("any", device, config=parameters(strategy="TimeSlicing"), shareID=ids[1])
    ready(node, first)
    ready(node, second)
    assert node.machine.timeslice(0) == 3
    node.unprepare(second)
    assert node.machine.timeslice(0) == 3
    node.unprepare(first)
    assert node.machine.timeslice(0) == 0


def test_shares_of_one_request_add_up(shared: Callable[..., Node]) -> None:
    node = shared(SharingRule("shares", 4, enforce="mps"))
    one = {"deviceClassName": "gpu.nvidia.com", "count": 2}
    selector = f"device.attributes['gpu.nvidia.com'].uuid == '{first_uuid(node)}'"
    ref = node.claim(
        "two",
        {"requests": [{"name": "gpu", "exactly": one | {"selectors": [{"cel": {"expression": selector}}]}}]},
    )
    ready(node, ref)
    for edit in edits(node, ref):
        assert environment(edit)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={2 * (81559 // 4)}M"
        assert environment(edit)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"


def test_time_slice_is_set_again_when_the_driver_was_reloaded_while_the_plugin_was_down(
    shared: Callable[..., Node],
) -> None:
    node = shared()
    config = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
    ref = node.allocated_by_hand("sliced", node.devices()[1]["name"], config=config)
    ready(node, ref)
    assert node.driver is not None
    node.driver.stop()
    node.machine.unload_driver()
    node.machine.load_driver()
    node.start_driver(mps_host="child")
    eventually(lambda: node.machine.timeslice(1) == 3)


# --- claims end whatever became of their tools ----------------------------------------------------

SLICED = parameters(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
MPS = parameters(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 25})

BROKEN = {
    "missing": None,
    "no permission": "echo 'Insufficient Permissions'; exit 4",
    "driver package upgraded": "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
    "foreign libc": "echo '/lib/libc.so.6: undefined symbol: __tunable_get_val, version GLIBC_PRIVATE' >&2; exit 127",
    "no interpreter": "exit 126",
    "crashed": "exit 255",
    "says nothing": "exit 1",
}


@contextmanager
def broken_smi(node: Node, script: str | None) -> Iterator[None]:
    """nvidia-smi as it is after a driver package was replaced or taken away; whole again afterwards."""
    smi = node.machine.host_root / "usr/bin/nvidia-smi"
    whole = smi.rename(smi.with_name("whole"))
    if script is not None:
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
    try:
        yield
    finally:
        whole.replace(smi)


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
def test_sliced_claim_ends_though_nvidia_smi_is_broken(
    shared: Callable[..., Node], script: str | None
) -> None:
    node = shared()
    name = node.devices()[2]["name"]
    ref = node.allocated_by_hand("sliced", name, config=SLICED)
    ready(node, ref)
    with broken_smi(node, script):
        assert node.unprepare(ref) == {ref.uid: None}
        assert (node.records(), list(node.cdi.glob(f"*{ref.uid}*"))) == ([], [])
        refused = node.allocated_by_hand("refused", name, config=SLICED)
        assert "nvidia-smi" in error(node, refused)
        assert node.records() == [], "what was refused leaves nothing"
        plain = node.allocated_by_hand("plain", name)
        ready(node, plain)
        assert node.unprepare(plain) == {plain.uid: None}
    ready(node, refused)


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
def test_mps_claim_ends_though_nvidia_smi_is_broken_and_the_gpu_is_given_back_later(
    shared: Callable[..., Node], script: str | None
) -> None:
    node = shared()
    before = snapshot(node)
    device = node.devices()[0]
    ref = node.allocated_by_hand("mps", device["name"], config=MPS)
    ready(node, ref)
    with broken_smi(node, script):
        assert node.unprepare(ref) == {ref.uid: None}
        now = snapshot(node)
        assert (node.records(), [key for key in now if key.startswith("process")]) == ([], [])
        assert node.machine.compute_mode(device["attributes"]["uuid"]["string"]) == 3, "cannot be set now"
    eventually(lambda: _settled(node) == before)


def test_mps_claim_is_refused_and_ends_where_no_host_was_installed(make_node: Callable[..., Node]) -> None:
    """The base of daemonset/ has none."""
    node = make_node()
    node.start_driver(mps_host="external")
    node.wait_devices(8)
    before = snapshot(node)
    name = node.devices()[0]["name"]
    ref = node.allocated_by_hand("mps", name, config=MPS)
    assert "no MPS host answers" in error(node, ref)
    assert snapshot(node) == before
    assert node.unprepare(ref) == {ref.uid: None}
    plain = node.allocated_by_hand("plain", name)
    ready(node, plain)
    assert node.unprepare(plain) == {plain.uid: None}
    assert snapshot(node) == before


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_mps_claim_ends_while_no_host_runs_and_the_next_host_stops_its_daemon(
    shared: Callable[..., Node], lost: bool, count: int
) -> None:
    node = shared()
    before = snapshot(node)
    names = [device["name"] for device in node.devices()[:count]]
    ref = node.allocated_by_hand("mps", *names, config=MPS)
    ready(node, ref)
    node.driver.stop()  # and the host with it, whose daemons run on
    if lost:
        next((node.plugin_dir / "mps").glob("*.json")).write_text("{")
    node.start_driver(mps_host="external")
    assert node.unprepare(ref) == {ref.uid: None}
    assert node.records() == []
    assert [key for key in snapshot(node) if key.startswith("process")] != [], "nobody could stop it"
    for number, name in enumerate(names):
        next_one = node.allocated_by_hand(f"next-{number}", name)
        assert "the end of the MPS daemon of device" in error(node, next_one)
        assert node.unprepare(next_one) == {next_one.uid: None}
    node.driver.stop()
    node.start_driver(mps_host="child")
    eventually(lambda: _settled(node) == before)
