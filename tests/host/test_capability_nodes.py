"""The capability nodes of MIG devices that nobody made: NVML makes a MIG device without them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.host.capability_nodes import CapabilityNodes
from dra_driver.host.device_nodes import Mknod
from dra_driver.host.mig_caps import MigCaps
from dra_driver.model.host import DeviceNode

CAPS = "driver/nvidia/capabilities"


class Written:
    """Keeps what was made; a node that is there is left alone, as by mknod(2)."""

    def __init__(self, *there: str, fails: OSError | None = None) -> None:
        self.made: dict[str, DeviceNode] = {}
        self._there = set(there)
        self._fails = fails

    def make(self, path: str, node: DeviceNode) -> None:
        if path in self._there:
            raise FileExistsError(path)
        if self._fails is not None:
            raise self._fails
        self._there.add(path)
        self.made[path] = node


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
    written = Written("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap84")
    CapabilityNodes(MigCaps(str(proc)), "/", written).make_missing()
    assert list(written.made.values()) == [node(13), node(14, 0o400)]


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
