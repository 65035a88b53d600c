"""Device nodes of the host, and the directory in which the NVIDIA nodes lie."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dra_driver.host.reading import names_in
from dra_driver.host.rooted_tree import join_root
from dra_driver.model.driver_files import HostNode
from dra_driver.model.host import DeviceNode, HostPaths, NodeType


class DeviceNodeReader(Protocol):
    """Reads a device node. The simulator has its own reader, which needs no root."""

    def read(self, path: str) -> DeviceNode | None:
        """The node at the path, or None where there is none or something that is no device node."""


class LstatDeviceNodeReader:
    """The device nodes of the file system. Symbolic links are not followed."""

    def read(self, path: str) -> DeviceNode | None:
        """The node at the path, or None where there is none or something that is no device node."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        kind = _node_type(status.st_mode)
        if kind is None:
            return None
        return DeviceNode(
            path=path,
            type=kind,
            major=os.major(status.st_rdev),
            minor=os.minor(status.st_rdev),
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
        )


class DeviceNodeMaker(DeviceNodeReader, Protocol):
    """Makes a device node. The simulator has its own maker, which needs no root."""

    def make(self, path: str, node: DeviceNode) -> None:
        """Make the node at the path, with its directory. Raises: FileExistsError if something is there; OSError."""

    def remove(self, path: str) -> None:
        """Remove the node at the path. Raises: OSError."""


class Mknod(LstatDeviceNodeReader):
    """Makes character nodes in the file system."""

    def make(self, path: str, node: DeviceNode) -> None:
        """Make the node at the path, with its directory. Raises: FileExistsError if something is there; OSError."""
        directory = Path(path).parent
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o755)
        os.mknod(path, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
        Path(path).chmod(node.mode)  # mknod(2) obeys the umask

    def remove(self, path: str) -> None:
        """Remove the node at the path. Raises: OSError."""
        Path(path).unlink()


def _node_type(mode: int) -> NodeType | None:
    if stat.S_ISCHR(mode):
        return "c"
    if stat.S_ISBLK(mode):
        return "b"
    return None


class DevRoot:
    """The nodes that containers can get: those of the host, never those in this process's own `/dev`."""

    def __init__(self, paths: HostPaths, reader: DeviceNodeReader) -> None:
        self._paths = paths
        self._reader = reader

    @property
    def root(self) -> str:
        """The directory that holds `dev`, as this process sees it.

        If the driver root has its own `dev`, that one counts, even while the NVIDIA nodes are missing in it: NVML makes
        nodes in a private `/dev`, and no container ever gets those.
        """
        if self._paths.dev_root is not None:
            return self._paths.dev_root
        driver_root = self._paths.driver_root
        if any(self._reader.read(join_root(driver_root, f"/dev/{name}")) for name in ("nvidiactl", "null")):
            return driver_root
        return driver_root if names_in(join_root(driver_root, "/dev")) else "/"

    def node(self, container_path: str) -> HostNode | None:
        """The node that containers see at the path, or None if the host does not have it."""
        root = self.root
        node = self._reader.read(join_root(root, container_path))
        if node is None:
            return None
        return HostNode(
            node=replace(node, path=container_path),
            host_path=join_root(self._host_root(root), container_path),
        )

    def _host_root(self, root: str) -> str:
        """The dev root as the runtime sees it: the driver root if that has `dev`, else the host's `/`."""
        driver_root = self._paths.driver_root.rstrip("/")
        root = root.rstrip("/")
        if root != driver_root and not root.startswith(driver_root + "/"):
            return "/"
        return join_root(self._paths.host_driver_root, root[len(driver_root) :])
