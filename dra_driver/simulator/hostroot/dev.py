"""/dev: the nodes of the NVIDIA driver, and a reader that describes nodes that could not be made."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from dra_driver.model.host import DeviceNode
from dra_driver.simulator import mig
from dra_driver.simulator.hostroot.entries import Directory, Entries, Link, Node, can_make_nodes
from dra_driver.simulator.hostroot.kernel import vfio_nodes
from dra_driver.simulator.machine_state import NVIDIA, State

NVIDIA_MAJOR = 195
DRM_MAJOR = 226
SWITCH_MAJOR = 234
_VIDEO, _RENDER = 44, 993


def devices(state: State) -> Entries:
    """While the NVIDIA driver is unloaded, its nodes stay, as on a host; the nodes of the DRM subsystem disappear."""
    system = state.system
    entries: Entries = {
        "dev/char": Directory(),  # udev makes links there, but none to the nodes of the NVIDIA driver
        "dev/nvidiactl": Node(NVIDIA_MAJOR, 255),
        "dev/nvidia-modeset": Node(NVIDIA_MAJOR, 254),
        "dev/nvidia-uvm": Node(system["uvm_major"], 0),
        "dev/nvidia-uvm-tools": Node(system["uvm_major"], 1),
        "dev/nvidia-caps/nvidia-cap1": Node(system["caps_major"], 1, 0o400),
        "dev/nvidia-caps/nvidia-cap2": Node(system["caps_major"], 2, 0o444),
    }
    for gpu in state.present:
        entries[f"dev/nvidia{gpu.minor}"] = Node(NVIDIA_MAJOR, gpu.minor)
        if gpu.drm is not None and state.driver_loaded and gpu.driver == NVIDIA:
            card, render = f"card{gpu.drm}", f"renderD{127 + gpu.drm}"
            entries[f"dev/dri/{card}"] = Node(DRM_MAJOR, gpu.drm, 0o660, _VIDEO)
            entries[f"dev/dri/{render}"] = Node(DRM_MAJOR, 127 + gpu.drm, 0o660, _RENDER)
            entries[f"dev/dri/by-path/pci-{gpu.bus_id}-card"] = Link(f"../{card}")
            entries[f"dev/dri/by-path/pci-{gpu.bus_id}-render"] = Link(f"../{render}")
        for gi, ci in gpu.mig_devices if system["cap_nodes"] else []:
            for minor in (
                mig.cap_minor(gpu.minor, gi.id),
                mig.cap_minor(gpu.minor, gi.id, ci.id),
            ):
                entries[f"dev/nvidia-caps/nvidia-cap{minor}"] = Node(system["caps_major"], minor, 0o444)
    switches = [item for item in state.functions if item.driver == "nvidia-nvswitch"]
    for number in range(len(switches)):
        entries[f"dev/nvidia-nvswitch{number}"] = Node(SWITCH_MAJOR, number)
    if switches:
        entries["dev/nvidia-nvswitchctl"] = Node(SWITCH_MAJOR, 255)
    if state.fabric.get("cluster"):
        entries["dev/nvidia-caps-imex-channels/channel0"] = Node(system["imex_major"], 0)
    return entries | vfio_nodes(state)


class SimulatedDeviceNodes:
    """Reads device nodes below the host root, real or described.

    It has the interface of the reader in `host`. A path may be one below the host root, or one as containers see it
    (`/dev/nvidia0`).
    """

    def __init__(self, host_root: Path) -> None:
        self._root = str(host_root)

    def read(self, path: str) -> DeviceNode | None:
        """The node at the path, or None where there is none."""
        full = self._full(os.path.normpath(path))
        try:
            status = full.lstat()
        except OSError:
            return None
        if stat.S_ISCHR(status.st_mode):
            return DeviceNode(
                path=path,
                type="c",
                major=os.major(status.st_rdev),
                minor=os.minor(status.st_rdev),
                mode=stat.S_IMODE(status.st_mode),
                uid=status.st_uid,
                gid=status.st_gid,
            )
        described = _description(full) if stat.S_ISREG(status.st_mode) else None
        return None if described is None else DeviceNode(path=path, type="c", uid=0, **described)

    def make(self, path: str, node: DeviceNode) -> None:
        """Make a node as someone on the host would: a file that describes it where nodes cannot be made. Raises:
        FileExistsError; OSError."""
        full = self._full(path)
        full.parent.mkdir(parents=True, exist_ok=True)
        if can_make_nodes(Path(self._root).parent):
            os.mknod(full, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
        else:
            with full.open("xb") as file:
                file.write(Node(node.major, node.minor, node.mode, node.gid).described.raw)

    def remove(self, path: str) -> None:
        """Remove a node as someone on the host would. Raises: OSError."""
        self._full(path).unlink()

    def _full(self, path: str) -> Path:
        return Path(path if path.startswith(f"{self._root}/") else f"{self._root}{path}")


def _description(path: Path) -> dict[str, Any] | None:
    """What the file says that stands for a node; None for any other file."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and said.keys() == {"major", "minor", "mode", "gid"} else None
