from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import RetryableError
from dra_driver.host.device_nodes import LstatDeviceNodeReader, Mknod
from dra_driver.host.gpu_nodes import CapabilityNodes, GpuNodes, MigCaps
from dra_driver.model.driver_files import HostNode
from dra_driver.model.host import DeviceNode, HostPaths
from tests.host.trees import FakeNodes, driver_root, pci_function, put

GPU = "0000:1b:00.0"
DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
236 nvidia-caps
237 nvidia-caps-imex-channels

Block devices:
  8 nvidia-caps-of-blocks
"""


def put_caps(root: Path) -> None:
    put(root, "proc/devices", DEVICES)
    capability = "proc/driver/nvidia/capabilities/gpu3/mig/gi1"
    put(root, f"{capability}/access", "DeviceFileMinor: 417\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    put(root, f"{capability}/ci0/access", "DeviceFileMinor: 418\nDeviceFileMode: 292\nDeviceFileModify: 1\n")


@pytest.fixture
def nodes(tmp_path: Path) -> FakeNodes:
    place = pci_function(tmp_path / "sys", GPU)
    for name in ("card4", "renderD131"):
        (place / "drm" / name).mkdir(parents=True)
    return driver_root(tmp_path)


@pytest.fixture
def gpu_nodes(tmp_path: Path, nodes: FakeNodes) -> GpuNodes:
    paths = HostPaths(str(tmp_path), "/host", proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys"))
    return GpuNodes(paths, nodes=nodes)


def test_a_whole_gpu_gets_its_node_and_its_graphics_nodes(gpu_nodes: GpuNodes) -> None:
    device = gpu_nodes.whole_gpu("gpu-a", 3, GPU)
    assert device.name == "gpu-a"
    assert device.nodes == (HostNode(DeviceNode("/dev/nvidia3", "c", 195, 3), "/host/dev/nvidia3"),)
    assert [node.node.path for node in device.drm] == ["/dev/dri/card4", "/dev/dri/renderD131"]
    assert device.links == (
        ("/dev/dri/by-path/pci-0000:1b:00.0-card", "../card4"),
        ("/dev/dri/by-path/pci-0000:1b:00.0-render", "../renderD131"),
    )


def test_a_graphics_node_is_left_out_when_the_host_lacks_it(
    tmp_path: Path, nodes: FakeNodes, gpu_nodes: GpuNodes
) -> None:
    del nodes.nodes[f"{tmp_path}/dev/dri/card4"]
    assert [node.node.path for node in gpu_nodes.whole_gpu("gpu-a", 3, GPU).drm] == ["/dev/dri/renderD131"]
    assert gpu_nodes.whole_gpu("gpu-a", 3, None).drm == ()


def test_a_missing_gpu_node_is_an_error(tmp_path: Path, nodes: FakeNodes, gpu_nodes: GpuNodes) -> None:
    del nodes.nodes[f"{tmp_path}/dev/nvidia3"]
    with pytest.raises(RetryableError, match=r"/dev/nvidia3 of gpu-a is missing.*nvidia-modprobe -c=3"):
        gpu_nodes.whole_gpu("gpu-a", 3, GPU)
    with pytest.raises(RetryableError, match="minor of gpu-a"):
        gpu_nodes.whole_gpu("gpu-a", None, GPU)


def test_a_mig_device_gets_capability_nodes_that_need_not_exist(tmp_path: Path, gpu_nodes: GpuNodes) -> None:
    put_caps(tmp_path)
    device = gpu_nodes.mig_device("mig-a", 3, GPU, 1, 0)
    assert device.nodes[1:] == tuple(
        HostNode(
            DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", "c", 236, minor, 0o444),
            f"/dev/nvidia-caps/nvidia-cap{minor}",
        )
        for minor in (417, 418)
    )
    assert device.drm == ()
    assert len(gpu_nodes.mig_device("mig-a", 3, GPU, 1, 0, graphics=True).drm) == 2


def test_a_destroyed_instance_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RetryableError, match="lists no nvidia-caps"):
        MigCaps(str(tmp_path / "proc")).nodes(3, 1, 0)
    put_caps(tmp_path)
    caps = MigCaps(str(tmp_path / "proc"))
    assert caps.majors()["nvidia-caps-imex-channels"] == 237
    with pytest.raises(RetryableError, match=r"gpu3/mig/gi2/access .*destroyed"):
        caps.nodes(3, 2, 0)
    put(tmp_path, "proc/driver/nvidia/capabilities/gpu3/mig/gi1/access", "nothing")
    with pytest.raises(RetryableError, match="does not name a device file"):
        caps.nodes(3, 1, 0)


def test_nodes_of_the_file_system_are_read(tmp_path: Path) -> None:
    reader = LstatDeviceNodeReader()
    node = reader.read("/dev/null")
    assert (node.type, node.major, node.minor) == ("c", 1, 3)
    put(tmp_path, "file")
    (tmp_path / "link").symlink_to("/dev/null")
    assert reader.read(str(tmp_path / "file")) is None
    assert reader.read(str(tmp_path / "link")) is None
    assert reader.read(str(tmp_path / "nothing")) is None


CAPS = "driver/nvidia/capabilities"


class Written:
    """Records created nodes; existing ones are not changed, like mknod(2)."""

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
def test_a_node_is_recreated_when_it_has_other_numbers_than_the_driver_says(proc: Path, stale: Any) -> None:
    """The kernel may give the driver another major number when it is loaded again."""
    written = Written(replace(node(12), **stale), node(13), node(14, 0o400), node(84))
    CapabilityNodes(MigCaps(str(proc)), "/", written).make_missing()
    assert list(written.made.values()) == [node(12)]


@pytest.mark.parametrize("put", [Path.mkdir, Path.touch, lambda path: path.symlink_to("/dev/null")])
def test_existing_file_is_kept_if_it_is_not_a_character_device(
    proc: Path, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    place = tmp_path / "root/dev/nvidia-caps/nvidia-cap12"
    place.parent.mkdir(parents=True)
    put(place)
    with pytest.raises(RetryableError) as caught:
        CapabilityNodes(MigCaps(str(proc)), str(tmp_path / "root"), Mknod()).make_missing()
    assert str(caught.value) == (
        "cannot create the device node /dev/nvidia-caps/nvidia-cap12 (c 237:12): another file has this path; "
        "remove that file, and find out what created it"
    )
    assert os.path.lexists(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="mknod(2) needs root")
def test_a_stale_node_in_the_file_system_is_recreated_and_a_block_device_is_not(
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
    with pytest.raises(RetryableError, match=r"nvidia-cap84 \(c 237:84\): another file has this path"):
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
        "cannot create the device node /dev/nvidia-caps/nvidia-cap12 (c 237:12): Operation not permitted; "
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
