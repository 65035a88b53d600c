"""Claims with MPS where the control program is NVIDIA's own, of each branch of its driver; GPUs and nvidia-smi are the
simulated machine's. Servers cannot start without a GPU, all else can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from debian_programs import Programs

from dra_driver.model.claim import ClaimRef
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.host_files import mps_layout
from tests.integration.conftest import Node, parameters
from tests.integration.test_process import call
from tests.integration.test_sharing import snapshot
from tests.integration.test_top import options

KNOWS_USERS, KNOWS_NO_MEMORY_LIMITS = ("R555",), ("R470",)


@pytest.fixture(scope="module")
def directory_of_nodes() -> str:
    """On the disk: MPS daemons have a /dev/shm of their own."""
    return "/tmp"


def with_programs_of(node: Node, programs: Programs) -> Node:
    """The node with the control program and the NVIDIA driver of a branch."""
    with node.machine._change() as state:  # loading another version would destroy its MIG devices
        state.driver_version = programs.version
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        program = node.machine.host_root / "usr/bin" / name
        program.unlink()
        [own] = programs.root.rglob(name)
        shutil.copy(own, program)
    return node


@pytest.fixture
def leaving_nothing() -> Iterator[Callable[[Node], Node]]:
    """For a running node, on which nothing of MPS may remain."""
    made: list[tuple[Node, dict[str, bytes]]] = []

    def note(node: Node) -> Node:
        made.append((node, snapshot(node)))
        return node

    yield note
    for node, before in made:
        node.must_unprepare(*node.recorded())
        assert snapshot(node) == before


@pytest.fixture
def real(
    make_node: Callable[..., Node], nvidia: Programs, leaving_nothing: Callable[[Node], Node]
) -> Callable[..., Node]:
    def make(**settings: Any) -> Node:
        node = with_programs_of(make_node(), nvidia)
        node.start_mps_host()
        return leaving_nothing(node.running(**settings))

    return make


def by_hand(node: Node, name: str, index: int = 0, kind: str = "GpuConfig", **mps: Any) -> ClaimRef:
    device = node.devices()[index]["name"]
    return node.allocated_by_hand(name, device, config=parameters(kind, strategy="MPS", mpsConfig=mps))


def daemon(node: Node, device: str) -> list[str]:
    """The arguments of the device's control daemon, which is the only process of MPS there."""
    [process] = processes.users_of(mps_layout(node.plugin_dir).directories(device).pipe)
    program, *arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:-1]
    assert Path(program.decode()).name == "nvidia-cuda-mps-control"
    return [argument.decode() for argument in arguments]


def test_claims_get_what_the_branch_knows(real: Callable[..., Node], nvidia: Programs) -> None:
    """Users share a daemon only if requested; limits are set and verified."""
    node = real()
    names = [device["name"] for device in node.devices()]
    plain = by_hand(node, "plain")
    outcome = node.ready(plain)
    assert daemon(node, names[0]) == ["-f"]
    assert node.machine.compute_mode(node.devices()[0]["attributes"]["uuid"]["string"]) == 3
    node.ready(by_hand(node, "threads", 1, defaultActiveThreadPercentage=25))
    both = by_hand(node, "both", 2, defaultActiveThreadPercentage=25, defaultPinnedDeviceMemoryLimit="1536Mi")
    if nvidia.branch in KNOWS_NO_MEMORY_LIMITS:
        node.refused(both, 'Unknown command "set_default_device_pinned_mem_limit"')
    else:
        node.ready(both)
    users = by_hand(node, "users", 3, multiUser=True)
    if nvidia.branch in KNOWS_USERS:
        node.ready(users)
        assert daemon(node, names[3]) == ["-f", "-multiuser-server"]
    else:
        node.refused(users, f"the node has NVIDIA driver {nvidia.version}; update it to R555 or newer")
    pipe = mps_layout(node.plugin_dir).directories(names[0]).pipe
    before = processes.users_of(pipe)
    node.stop_mps_host()
    node.start_mps_host()
    node.restart_driver()
    assert node.ready(plain) == outcome
    assert processes.users_of(pipe) == before, "daemons outlive the host"


def test_shares_get_a_daemon_for_all_their_users_where_the_branch_can(
    real: Callable[..., Node], nvidia: Programs
) -> None:
    node = real(sharing=share_all(SharingRule("memory", enforce="mps")))
    device = node.devices()[0]["name"]
    refs = [node.share_by_hand(number, device) for number in (1, 2)]
    for ref in refs:
        node.ready(ref)
    assert daemon(node, device) == ["-f", *(["-multiuser-server"] if nvidia.branch in KNOWS_USERS else [])]
    node.must_unprepare(refs[0])
    assert daemon(node, device)[:1] == ["-f"], "the other share uses it"


def test_a_mig_device_has_its_own_daemon(
    make_node: Callable[..., Node], newest_nvidia: Programs, leaving_nothing: Callable[[Node], Node]
) -> None:
    node = with_programs_of(make_node("h100-mig-static"), newest_nvidia)
    node.start_mps_host()
    leaving_nothing(node.running(13))
    index, device = next((n, one) for n, one in enumerate(node.devices()) if "-mig-" in one["name"])
    node.ready(by_hand(node, "part", index, "MigDeviceConfig", defaultActiveThreadPercentage=50))
    assert daemon(node, device["name"]) == ["-f"]
    [shown] = json.loads(call("top", "-o", "json", *options(node)).stdout)["mps"]
    directory = mps_layout(node.plugin_dir).directory(device["name"])
    assert (shown["device"], shown["directory"]) == (device["name"], str(directory))
    assert directory.name.startswith("gpu_")
