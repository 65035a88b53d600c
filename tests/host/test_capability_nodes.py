"""The capability nodes of MIG devices that nobody made: NVML makes a MIG device without them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import RetryableError
from dra_driver.host.capability_nodes import CapabilityNodes, MigCaps
from dra_driver.host.device_nodes import Mknod
from dra_driver.model.host import DeviceNode

CAPS = "driver/nvidia/capabilities"


class Written:
    """Keeps what was made; what is there is left alone, as by mknod(2)."""

    def __init__(self, *there: DeviceNode, fails: OSError | None = None) -> None:
        self.made: dict[str, DeviceNode] = {}
        self._there = {node.path: node for node in there}
        self._fails = fails

    def read(self, path: str) -> DeviceNode | None:
        return self._there.get(path)

    def make(self, path: str, node: DeviceNode) -> None:
        if path in self._there:
            raise FileExistsError(path)
        if self._fails is not None:
            raise self._fails
        self._there[path] = self.made[path] = node

    def remove(self, path: str) -> None:
        del self._there[path]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Two GPU instances on one GPU, one of them with two compute instances."""
    (tmp_path / "devices").write_text("Character devices:\n195 nvidia\n237 nvidia-caps\n\nBlock devices:\n")
    capability(tmp_path, "mig/config", 1, mode=256)
    capability(tmp_path, "gpu0/mig/gi1/access", 12)
    capability(tmp_path, "gpu0/mig/gi1/ci0/access", 13)
    capability(tmp_path, "gpu0/mig/gi1/ci1/access", 14, mode=256)
    capability(tmp_path, "gpu0/mig/gi9/access", 84)
    return tmp_path


def capability(proc: Path, name: str, minor: int, *, mode: int = 292, modify: int = 1) -> None:
    path = proc / CAPS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: {modify}\n")


def node(minor: int, mode: int = 0o444) -> DeviceNode:
    return DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", "c", 237, minor, mode)


def test_missing_nodes_of_all_instances_are_made_when_none_is_there(proc: Path) -> None:
    written = Written()
    CapabilityNodes(MigCaps(str(proc)), "/host", written).make_missing()
    assert written.made == {
        f"/host{one.path}": one for one in (node(12), node(13), node(14, 0o400), node(84))
    }


def test_nodes_that_are_there_are_left_alone_when_others_are_made(proc: Path) -> None:
    written = Written(node(12), replace(node(84), mode=0o666, gid=44))
    CapabilityNodes(MigCaps(str(proc)), "/", written).make_missing()
    assert list(written.made.values()) == [node(13), node(14, 0o400)]


@pytest.mark.parametrize("stale", [{"major": 238}, {"minor": 13}])
def test_a_node_is_made_anew_when_it_has_other_numbers_than_the_driver_says(proc: Path, stale: Any) -> None:
    """The kernel may give the driver another major number when it is loaded again."""
    written = Written(replace(node(12), **stale), node(13), node(14, 0o400), node(84))
    CapabilityNodes(MigCaps(str(proc)), "/", written).make_missing()
    assert list(written.made.values()) == [node(12)]


@pytest.mark.parametrize("put", [Path.mkdir, Path.touch, lambda path: path.symlink_to("/dev/null")])
def test_what_is_there_is_left_when_it_is_no_character_device(
    proc: Path, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    place = tmp_path / "root/dev/nvidia-caps/nvidia-cap12"
    place.parent.mkdir(parents=True)
    put(place)
    with pytest.raises(RetryableError) as caught:
        CapabilityNodes(MigCaps(str(proc)), str(tmp_path / "root"), Mknod()).make_missing()
    assert str(caught.value) == (
        "cannot make the device node /dev/nvidia-caps/nvidia-cap12 (c 237:12): something else is there; "
        "remove it from the node, and find out what has put it there"
    )
    assert os.path.lexists(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="mknod(2) needs root")
def test_a_stale_node_in_the_file_system_is_made_anew_and_a_block_device_is_not(
    proc: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    Mknod().make(f"{root}{node(12).path}", replace(node(12), major=238))
    nodes = CapabilityNodes(MigCaps(str(proc)), str(root), Mknod())
    nodes.make_missing()
    made = Mknod().read(f"{root}{node(12).path}")
    assert made == replace(node(12), path=f"{root}{node(12).path}", uid=0, gid=0)
    block = root / "dev/nvidia-caps/nvidia-cap84"
    block.unlink()
    os.mknod(block, stat.S_IFBLK | 0o600, os.makedev(237, 84))
    with pytest.raises(RetryableError, match=r"nvidia-cap84 \(c 237:84\): something else is there"):
        nodes.make_missing()


def test_a_node_is_left_to_the_administrator_when_the_driver_says_so(proc: Path) -> None:
    capability(proc, "gpu0/mig/gi9/access", 84, modify=0)
    written = Written()
    CapabilityNodes(MigCaps(str(proc)), "/", written).make_missing()
    assert node(84) not in written.made.values()


def test_nothing_is_made_when_the_machine_has_no_mig_device(tmp_path: Path) -> None:
    written = Written()
    CapabilityNodes(MigCaps(str(tmp_path)), "/", written).make_missing()
    assert written.made == {}


def test_the_error_says_what_to_do_when_a_node_cannot_be_made(proc: Path) -> None:
    refused = Written(fails=PermissionError(1, "Operation not permitted"))
    with pytest.raises(RetryableError) as caught:
        CapabilityNodes(MigCaps(str(proc)), "/", refused).make_missing()
    assert str(caught.value) == (
        "cannot make the device node /dev/nvidia-caps/nvidia-cap12 (c 237:12): Operation not permitted; "
        "run the MPS host as root with the host's /dev (in a pod: privileged), "
        "or run `nvidia-modprobe -f /proc/driver/nvidia/capabilities/gpu0/mig/gi1/access` on the node"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mknod(2) needs root")
def test_a_node_has_the_numbers_and_the_mode_of_the_driver_when_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "dev/nvidia-caps/nvidia-cap14"
    umask = os.umask(0o077)
    try:
        Mknod().make(str(path), node(14))
    finally:
        os.umask(umask)
    status = path.lstat()
    assert (stat.S_ISCHR(status.st_mode), status.st_rdev, stat.S_IMODE(status.st_mode)) == (
        True,
        os.makedev(237, 14),
        0o444,
    )
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    with pytest.raises(FileExistsError):
        Mknod().make(str(path), node(14))
