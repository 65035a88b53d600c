"""Claims with MPS where the control program is NVIDIA's own, of each branch of its driver; GPUs and nvidia-smi are the
simulated machine's. Servers cannot start without a GPU, all else can."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nvidia_programs import Programs

from dra_driver.model.claim import ClaimRef
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.layout import mps_layout
from tests.integration.conftest import NODE, Node
from tests.integration.test_sharing import error, parameters, ready, snapshot

KNOWS_USERS, KNOWS_NO_MEMORY_LIMITS = ("R555",), ("R470",)


@pytest.fixture(scope="module")
def directory_of_nodes() -> None:
    """On the disk: MPS daemons have a /dev/shm of their own."""


@pytest.fixture
def real(make_node: Callable[..., Node], nvidia: Programs) -> Iterator[Callable[..., Node]]:
    """A node with a control program and an NVIDIA driver of that branch; nothing of MPS may be left."""
    made: list[tuple[Node, dict[str, bytes]]] = []

    def make(machine: str = "dgx-h100", count: int = 8, rule: SharingRule | None = None) -> Node:
        node = make_node(machine)
        with node.machine._change() as state:  # loading another version would end its MIG devices
            state.driver_version = nvidia.version
        for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
            program = node.machine.host_root / "usr/bin" / name
            program.unlink()
            [own] = nvidia.root.rglob(name)
            shutil.copy(own, program)
        node.start_driver(mps_host="child", **({} if rule is None else {"sharing": share_all(rule)}))
        node.wait_devices(count)
        made.append((node, snapshot(node)))
        return node

    yield make
    for node, before in made:
        refs = [ClaimRef("default", "any", name.removesuffix(".json")) for name in node.records()]
        assert all(outcome is None for outcome in node.unprepare(*refs).values())
        assert snapshot(node) == before


def by_hand(node: Node, name: str, index: int = 0, kind: str = "GpuConfig", **mps: Any) -> ClaimRef:
    device = node.devices()[index]["name"]
    return node.allocated_by_hand(name, device, config=parameters(kind, strategy="MPS", mpsConfig=mps))


def daemon(node: Node, device: str) -> list[str]:
    """The arguments of the device's control daemon, which is the only process of MPS there."""
    [process] = processes.users_of(mps_layout(node.plugin_dir).directories(device).pipe)
    program, *arguments = processes._arguments(process.pid)[:-1]
    assert Path(program.decode()).name == "nvidia-cuda-mps-control"
    return [argument.decode() for argument in arguments]


def test_claims_without_limits_share_nothing_but_their_user(real: Callable[..., Node]) -> None:
    node = real()
    ref = by_hand(node, "plain")
    ready(node, ref)
    assert daemon(node, node.devices()[0]["name"]) == ["-f"]
    assert node.machine.compute_mode(node.devices()[0]["attributes"]["uuid"]["string"]) == 3


def test_limits_are_set_and_read_back(real: Callable[..., Node], nvidia: Programs) -> None:
    node = real()
    ready(node, by_hand(node, "threads", defaultActiveThreadPercentage=25))
    both = by_hand(node, "both", 1, defaultActiveThreadPercentage=25, defaultPinnedDeviceMemoryLimit="1536Mi")
    if nvidia.branch in KNOWS_NO_MEMORY_LIMITS:
        assert 'Unknown command "set_default_device_pinned_mem_limit"' in error(node, both)
    else:
        ready(node, both)


def test_several_users_are_served_or_refused_by_the_branch(
    real: Callable[..., Node], nvidia: Programs
) -> None:
    node = real()
    ref = by_hand(node, "users", multiUser=True)
    if nvidia.branch in KNOWS_USERS:
        ready(node, ref)
        assert daemon(node, node.devices()[0]["name"]) == ["-f", "-multiuser-server"]
    else:
        text = error(node, ref)
        assert f"the node has NVIDIA driver {nvidia.version}; update it to R555 or newer" in text
        assert node.records() == []


def test_shares_get_a_daemon_for_all_their_users_where_the_branch_can(
    real: Callable[..., Node], nvidia: Programs
) -> None:
    node = real(rule=SharingRule("memory", enforce="mps"))
    device = node.devices()[0]["name"]
    refs = []
    for number in (1, 2):
        result = {
            "request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": device,
            "shareID": f"{number}1111111-1111-1111-1111-111111111111",
            "consumedCapacity": {"memory": f"{number}Gi"},
        }  # fmt: skip
        allocation = {"devices": {"results": [result]}}
        refs.append(node.claim(f"share-{number}", status={"allocation": allocation}))
        ready(node, refs[-1])
    assert daemon(node, device) == ["-f", *(["-multiuser-server"] if nvidia.branch in KNOWS_USERS else [])]
    assert node.unprepare(refs[0]) == {refs[0].uid: None}
    assert daemon(node, device)[:1] == ["-f"], "the other share uses it"


def test_a_mig_device_has_a_daemon_of_its_own(real: Callable[..., Node]) -> None:
    node = real("h100-mig-static", 13)
    index, device = next((n, one) for n, one in enumerate(node.devices()) if "-mig-" in one["name"])
    ready(node, by_hand(node, "part", index, "MigDeviceConfig", defaultActiveThreadPercentage=50))
    assert daemon(node, device["name"]) == ["-f"]


def test_daemons_outlive_the_host_and_are_taken_over(real: Callable[..., Node]) -> None:
    node = real()
    ref = by_hand(node, "long", defaultActiveThreadPercentage=25)
    outcome = ready(node, ref)
    pipe = mps_layout(node.plugin_dir).directories(node.devices()[0]["name"]).pipe
    before = processes.users_of(pipe)
    assert node.driver is not None
    node.driver.stop()
    node.start_driver(mps_host="child")
    assert ready(node, ref) == outcome
    assert processes.users_of(pipe) == before
