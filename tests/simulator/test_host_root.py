"""The host as files: nodes, /proc, /sys, the driver's installation."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from dra_driver.errors import StateError
from dra_driver.model.host import DeviceNode
from dra_driver.simulator import SimulatedDeviceNodes, open_machine
from dra_driver.simulator.hostroot.entries import can_make_nodes

NODE_KINDS = [
    "described",
    pytest.param("real", marks=pytest.mark.skipif(not can_make_nodes(Path("/tmp")), reason="needs mknod")),
]


def numbers(machine, path):
    node = SimulatedDeviceNodes(machine.host_root).read(path)
    return None if node is None else (node.major, node.minor, node.mode, node.gid)


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_device_nodes(kind, make):
    machine = make("h100-mig-static", device_nodes=kind)
    assert numbers(machine, "/dev/nvidiactl") == (195, 255, 0o666, 0)
    assert numbers(machine, "/dev/nvidia7") == (195, 7, 0o666, 0)
    assert numbers(machine, "/dev/nvidia-modeset") == (195, 254, 0o666, 0)
    assert numbers(machine, "/dev/nvidia-uvm-tools") == (508, 1, 0o666, 0)
    assert numbers(machine, "/dev/dri/renderD128") == (226, 128, 0o660, 993)
    assert numbers(machine, "/dev/dri/card1") == (226, 1, 0o660, 44)
    assert numbers(machine, "/dev/nvidia-caps/nvidia-cap12") == (237, 12, 0o444, 0)
    assert numbers(machine, "/dev/nvidia-caps/nvidia-cap13") == (237, 13, 0o444, 0)
    assert numbers(machine, "/dev/nvidia8") is None
    assert numbers(machine, "/dev") is None
    full = str(machine.host_root / "dev/nvidia0")
    assert SimulatedDeviceNodes(machine.host_root).read(full) == DeviceNode(full, "c", 195, 0, 0o666, 0, 0)
    assert stat.S_ISCHR(os.lstat(full).st_mode) == (kind == "real")


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_capabilities_follow_the_instances(kind, make):
    machine = make("dgx-h100", device_nodes=kind)
    machine.set_mig_mode(2, True)
    gi, ci, _ = machine.create_mig(2, "1g.10gb", 0)
    caps = machine.host_root / "proc/driver/nvidia/capabilities"
    access = caps / f"gpu2/mig/gi{gi}/access"
    minor = 3 + 135 * 2 + 9 * gi
    assert access.read_text() == f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert f"DeviceFileMinor: {minor + 1}\n" in (caps / f"gpu2/mig/gi{gi}/ci{ci}/access").read_text()
    assert numbers(machine, f"/dev/nvidia-caps/nvidia-cap{minor}") == (237, minor, 0o444, 0)
    minors = (machine.host_root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    assert f"gpu2/gi{gi}/access {minor}" in minors
    assert (minors[0], minors[-1], len(minors)) == ("config 1", "gpu31/gi14/ci7/access 4322", 4322)
    machine.destroy_mig(2, gi)
    assert list((caps / "gpu2/mig").iterdir()) == []
    assert numbers(machine, f"/dev/nvidia-caps/nvidia-cap{minor}") is None
    assert (caps / "mig/config").read_text().splitlines()[1] == "DeviceFileMode: 256"


def everything(root):
    return {
        str(path): (os.lstat(path).st_ino, os.lstat(path).st_mtime_ns)
        for path in root.rglob("*")
        if not path.is_dir()
    }


def test_a_change_touches_only_what_changed(make):
    machine = make("dgx-h100")
    before = everything(machine.host_root)
    machine.raise_xid(0, 48)
    assert everything(machine.host_root) == before
    machine.lose_gpu(0)
    changed = {path for path, mark in everything(machine.host_root).items() if before.get(path) != mark}
    assert {Path(path).name for path in changed} == {"config", "nvidia-smi"}


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_damage_is_repaired_and_foreign_files_stay(kind, make):
    machine = make("dgx-h100", device_nodes=kind)
    before = everything(machine.host_root)
    (machine.host_root / "dev/nvidia0").unlink()
    (machine.host_root / "proc/devices").write_text("")
    (machine.host_root / "tmp/foreign").write_text("mine")
    (machine.directory / "rendered").unlink()
    open_machine(machine.directory)
    after = everything(machine.host_root)
    assert after.keys() - before.keys() == {str(machine.host_root / "tmp/foreign")}
    assert before.keys() <= after.keys()
    assert "195 nvidia" in (machine.host_root / "proc/devices").read_text()
    assert numbers(machine, "/dev/nvidia0") == (195, 0, 0o666, 0)


def test_session_does_not_create_a_removed_machine_again(make):
    machine = make("t4-4")
    shutil.rmtree(machine.directory)
    with pytest.raises(StateError, match="is gone"):
        machine.open_session("late")
    assert not machine.directory.exists()
