"""The daemon's files belong only to root, and it needs no kernel capability to create them."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.model.claim import ClaimRef
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, Node, sliced

FOR_ALL = {"cdi", "dra-device-metadata"}
"""Runtimes and containers read what lies in there; it is written by root alone."""
PLUGIN_DIRECTORY = 0o750
"""The mode that other plugins of the kubelet use; group root may list it."""


@pytest.fixture
def spawn(make_node: Callable[..., Node]) -> Callable[..., Node]:
    """A node whose daemon is a process with the most generous umask, behind the command `without`."""

    def make(*without: str) -> Node:
        node = make_node()
        node.spawn(behind=without, umask=0, DYNAMIC_MIG="true", DEVICE_METADATA="both")
        node.kubelet.wait_registered(DRIVER)
        eventually(lambda: len(node.devices()) > 200)
        return node

    return make


def in_use(node: Node) -> list[ClaimRef]:
    """Claims of every kind that leaves something on the disk: a GPU, a time slice, a MIG device on demand."""
    names = [device["name"] for device in node.devices()]
    mig = next(name for name in names if "mig" in name)
    whole = [name for name in names if "mig" not in name and not mig.startswith(name)]
    refs = [
        node.allocated_by_hand("plain", whole[0]),
        node.allocated_by_hand("slice", whole[1], config=sliced("Long")),
        node.allocated_by_hand("mig", mig),
    ]
    for ref in refs:
        node.ready(ref)
    return refs


def test_only_root_reads_state_and_only_root_writes_anything(spawn: Callable[..., Node]) -> None:
    node = spawn()
    in_use(node)
    node._processes[-1].send_signal(signal.SIGSTOP)  # no file goes while this looks
    found: dict[str, set[str]] = {"private": set(), "for all": set()}
    for top in (node.plugin_dir, node.registry, node.cdi):
        for path in (top, *top.rglob("*")):
            status = path.lstat()
            mode, name = stat.S_IMODE(status.st_mode), str(path.relative_to(node.root))
            assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid()), name
            if path.parent.name == "host.lib":  # the driver's libraries for nvidia-smi
                assert path.readlink().is_relative_to(node.machine.host_root), name
                continue
            assert not stat.S_ISLNK(status.st_mode), name
            if path == node.registry:
                continue  # the kubelet's
            if path == node.plugin_dir:
                assert mode == PLUGIN_DIRECTORY
            elif FOR_ALL & set(Path(name).parts):
                assert mode == (0o755 if path.is_dir() else 0o644), (name, oct(mode))
                found["for all"].add(Path(name).parts[-1])
            else:
                assert mode == (0o700 if path.is_dir() else 0o600), (name, oct(mode))
                found["private"].add(path.name)
    # All kinds were checked: records, ledger, locks, sockets; specs and metadata.
    assert {"claims", "ledger", "worker.lock", "dra.sock", f"{DRIVER}-reg.sock"} <= found["private"]
    assert any(name.endswith(".lock") for name in found["private"])
    assert sum(name.endswith(".json") for name in found["private"]) > 4
    assert "metadata.json" in found["for all"]


def dropped() -> tuple[str, ...]:
    """Run a command without any capability, and unable to get one."""
    program = shutil.which("setpriv")
    if program is None or os.getuid() != 0:
        pytest.skip("needs root, and setpriv of util-linux")
    return (program, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")


@pytest.mark.root
def test_no_capability_is_needed_on_the_side_of_the_kernel(spawn: Callable[..., Node]) -> None:
    """Files, locks, sockets and devices that are only described; the GPU driver's own requirements are not
    covered.
    """
    without = dropped()
    status = subprocess.run(
        [*without, "cat", "/proc/self/status"], capture_output=True, text=True, check=True
    ).stdout
    assert "CapEff:\t0000000000000000" in status
    node = spawn(*without)
    node.must_unprepare(*in_use(node))
    assert (node.specs(), node.records()) == ([], [])
