import os
import stat
from pathlib import Path

import pytest

from dra_driver.host.device_nodes import DevCharLinks
from dra_driver.model.host import HostPaths
from tests.fakes.fixtures import logs
from tests.host.trees import COMMON_NODES, FakeNodes

__all__ = ["logs"]

Logs = list[dict[str, object]]
CAP = "/dev/nvidia-caps/nvidia-cap21"
NODES = {**COMMON_NODES, "/dev/nvidia0": (195, 0), CAP: (236, 21)}
RIGHT = {
    "195:0": "../nvidia0",
    "195:254": "../nvidia-modeset",
    "195:255": "../nvidiactl",
    "236:21": "../nvidia-caps/nvidia-cap21",
    "511:0": "../nvidia-uvm",
    "511:1": "../nvidia-uvm-tools",
}


class Host:
    """A host's /dev with NVIDIA's nodes, without links to them, and with the node and link of another driver."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = FakeNodes()
        for path, numbers in {**NODES, "/dev/fuse": (10, 229)}.items():
            self.add(path, *numbers)
        self.char = root / "dev/char"
        self.char.mkdir()
        (self.char / "10:229").symlink_to("../fuse")

    def add(self, path: str, major: int, minor: int) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        self.nodes.add(str(file), major, minor)

    @property
    def links(self) -> DevCharLinks:
        root = str(self.root)
        return DevCharLinks(HostPaths(root, root, dev_root=root), self.nodes)

    def shown(self) -> dict[str, str]:
        return {path.name: str(path.readlink()) for path in self.char.iterdir() if path.is_symlink()}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_links_that_are_missing_are_made(host: Host, logs: Logs) -> None:
    assert host.links.missing() == RIGHT
    host.links.make()
    assert host.shown() == {"10:229": "../fuse", **RIGHT}
    [entry] = logs
    assert (entry["event"], set(entry["links"])) == ("dev_char_links_made", set(RIGHT))  # type: ignore[call-overload]
    assert host.links.missing() == {}
    host.links.make()
    assert len(logs) == 1


def test_only_nodes_of_the_nvidia_driver_that_are_requested_are_linked(host: Host) -> None:
    (host.char / "10:229").unlink()
    host.links.make(["/dev/nvidia0", "/dev/fuse", "/dev/nvidia7", "/dev/dri/card1"])
    assert host.shown() == {"195:0": "../nvidia0"}


def test_link_to_the_right_node_in_another_way_is_left_alone(host: Host) -> None:
    (host.char / "195:0").symlink_to(host.root / "dev/nvidia0")
    before = os.lstat(host.char / "195:0").st_ino
    host.links.make()
    assert os.lstat(host.char / "195:0").st_ino == before
    assert host.shown() == {"10:229": "../fuse", **RIGHT, "195:0": str(host.root / "dev/nvidia0")}


@pytest.mark.parametrize("target", ["../nvidia-uvm", "../gone", "/run/nvidia/driver/dev/gone", "../fuse"])
def test_link_to_another_node_is_replaced(host: Host, target: str) -> None:
    (host.char / "195:0").symlink_to(target)
    assert host.links.missing(["/dev/nvidia0"]) == {"195:0": "../nvidia0"}
    host.links.make()
    assert host.shown() == {"10:229": "../fuse", **RIGHT}


def test_links_of_other_numbers_are_left_alone_even_if_they_lead_nowhere(host: Host) -> None:
    others = {"195:7": "../nvidia7", "508:0": "../nvidia-uvm", "1:3": "../null"}
    for name, target in others.items():
        (host.char / name).symlink_to(target)
    host.links.make()
    assert host.shown() == {"10:229": "../fuse", **RIGHT, **others}


def test_file_in_the_place_of_a_link_is_left_alone(host: Host) -> None:
    (host.char / "195:0").write_text("a node of its own")
    host.links.make()
    assert stat.S_ISREG(os.lstat(host.char / "195:0").st_mode)


def test_uvm_with_another_number_after_a_reload_gets_its_link(host: Host) -> None:
    host.links.make()
    host.add("/dev/nvidia-uvm", 508, 0)
    host.links.make()
    assert host.shown()["508:0"] == "../nvidia-uvm"


def test_nodes_below_a_driver_root_are_linked_by_their_whole_path(tmp_path: Path) -> None:
    """As with a driver container whose nodes are not in the host's /dev."""
    nodes, inside = FakeNodes(), tmp_path / "driver-root"
    (inside / "dev").mkdir(parents=True)
    for name, numbers in {"nvidiactl": (195, 255), "nvidia0": (195, 0)}.items():
        (inside / "dev" / name).write_text("")
        nodes.add(f"{inside}/dev/{name}", *numbers)
    links = DevCharLinks(HostPaths(str(inside), "/run/nvidia/driver"), nodes)
    assert links.directory == "/dev/char"
    assert links.missing() == {
        "195:0": "/run/nvidia/driver/dev/nvidia0",
        "195:255": "/run/nvidia/driver/dev/nvidiactl",
    }


def test_directory_that_takes_no_links_is_logged_once_and_fails_nothing(host: Host, logs: Logs) -> None:
    for link in host.char.iterdir():
        link.unlink()
    host.char.rmdir()
    links = host.links
    for _ in range(2):
        links.make()
        links.make(["/dev/nvidia0"])
    reason = f"cannot create links in {host.char}: No such file or directory"
    assert logs == [{"event": "dev_char_links_failed", "log_level": "warning", "reason": reason}]
    host.char.mkdir()
    links.make()
    assert host.shown() == RIGHT
    (host.char / "195:0").unlink()
    host.char.rename(host.root / "dev/away")
    links.make()
    assert [entry["event"] for entry in logs] == [
        "dev_char_links_failed",
        "dev_char_links_made",
        "dev_char_links_failed",
    ]
