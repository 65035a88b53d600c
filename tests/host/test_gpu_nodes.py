from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.host.capability_nodes import MigCaps
from dra_driver.host.device_nodes import LstatDeviceNodeReader
from dra_driver.host.gpu_nodes import GpuNodes
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
    with pytest.raises(RetryableError, match="names no device file"):
        caps.nodes(3, 1, 0)


def test_nodes_of_the_file_system_are_read(tmp_path: Path) -> None:
    reader = LstatDeviceNodeReader()
    node = reader.read("/dev/null")
    assert node is not None
    assert (node.type, node.major, node.minor) == ("c", 1, 3)
    put(tmp_path, "file")
    (tmp_path / "link").symlink_to("/dev/null")
    assert reader.read(str(tmp_path / "file")) is None
    assert reader.read(str(tmp_path / "link")) is None
    assert reader.read(str(tmp_path / "nothing")) is None
