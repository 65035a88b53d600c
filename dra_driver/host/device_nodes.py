"""Device nodes of the host, and links to NVIDIA's in /dev/char.

systemd looks up a device by `/dev/char/<major>:<minor>` when it sets which devices a container may open. udev does not
create these links for NVIDIA's nodes. Without them, a `systemctl daemon-reload` cuts containers off from their GPUs,
with runc 1.1.3 to 1.1.6 or systemd before 240.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import structlog

from dra_driver.base.atomic import replace_symlink
from dra_driver.host.rooted_tree import RootedTree, join_root, names_in
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.driver_files import CdiMount, HostNode
from dra_driver.model.host import (
    HOST_DEVICE_FILES,
    HOST_DEVICE_NODES,
    DeviceNode,
    HostDevice,
    HostPaths,
    NodeType,
)

_log = structlog.get_logger(__name__)

_DIRECTORIES = ("/dev", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels")
_PREFIX = "/dev/nvidia"
_MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")


class DeviceNodeReader(Protocol):
    """The simulator has its own reader and maker, which do not need root."""

    def read(self, path: str) -> DeviceNode | None:
        """Return the node at the path; None if there is no device node."""


class LstatDeviceNodeReader:
    """Does not follow symbolic links."""

    def read(self, path: str) -> DeviceNode | None:
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
    def make(self, path: str, node: DeviceNode) -> None:
        """Create the node and its directory. Raises: OSError, such as FileExistsError."""

    def remove(self, path: str) -> None:
        """Remove the node. Raises: OSError."""


class Mknod(LstatDeviceNodeReader):
    def make(self, path: str, node: DeviceNode) -> None:
        directory = Path(path).parent
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o755)
        os.mknod(path, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
        Path(path).chmod(node.mode)  # mknod(2) applies the umask

    def remove(self, path: str) -> None:
        Path(path).unlink()


def _node_type(mode: int) -> NodeType | None:
    if stat.S_ISCHR(mode):
        return "c"
    if stat.S_ISBLK(mode):
        return "b"
    return None


class DevRoot:
    def __init__(self, paths: HostPaths, reader: DeviceNodeReader) -> None:
        self._paths = paths
        self._reader = reader

    @property
    def root(self) -> str:
        """The directory that contains `dev`, as this process sees it.

        A `dev` in the driver root is used even without NVIDIA nodes: NVML may create them in this process's own `/dev`,
        where no container gets them.
        """
        if self._paths.dev_root is not None:
            return self._paths.dev_root
        driver_root = self._paths.driver_root
        if any(self._reader.read(join_root(driver_root, f"/dev/{name}")) for name in ("nvidiactl", "null")):
            return driver_root
        return driver_root if names_in(join_root(driver_root, "/dev")) else "/"

    def node(self, container_path: str) -> HostNode | None:
        root = self.root
        node = self._reader.read(join_root(root, container_path))
        if node is None:
            return None
        return HostNode(
            node=replace(node, path=container_path),
            host_path=join_root(self._host_root(root), container_path),
        )

    def _host_root(self, root: str) -> str:
        driver_root = self._paths.driver_root.rstrip("/")
        root = root.rstrip("/")
        if root != driver_root and not root.startswith(driver_root + "/"):
            return "/"
        return join_root(self._paths.host_driver_root, root[len(driver_root) :])


class DevCharLinks:
    """Only to the NVIDIA driver's nodes, which `paths` names as containers see them; None means all."""

    def __init__(self, paths: HostPaths, nodes: DeviceNodeReader) -> None:
        self._dev = DevRoot(paths, nodes)
        self._nodes = nodes
        self._root = paths.dev_root or "/"
        self.directory = join_root(self._root, "/dev/char")
        self._reported: str | None = None
        self._lock = threading.Lock()

    def missing(self, paths: Iterable[str] | None = None) -> dict[str, str]:
        """Return the targets of missing and wrong links, by link name, such as `195:0`.

        Leaves out files that are not links, and links with another path to the right node.
        """
        found = {}
        for path in self._all() if paths is None else paths:
            node = self._dev.node(path) if path.startswith(_PREFIX) else None
            if node is not None and node.node.type == "c":
                name = f"{node.node.major}:{node.node.minor}"
                if not self._is_right(name, node):
                    found[name] = self._target(node)
        return found

    def make(self, paths: Iterable[str] | None = None) -> None:
        """Create or replace links. Only logs a failure: containers work without the links."""
        made, problem = [], None
        for name, target in self.missing(paths).items():
            try:
                replace_symlink(Path(self.directory, name), target)
                made.append(name)
            except OSError as error:
                problem = f"cannot create links in {self.directory}: {error.strerror or error}"
                break
        with self._lock:
            is_news = problem not in (None, self._reported)
            if paths is None or problem is not None:
                self._reported = problem
        if made:
            _log.info("dev_char_links_made", links=made)
        if is_news:
            _log.warning("dev_char_links_failed", reason=problem)

    def _all(self) -> Iterator[str]:
        root = self._dev.root
        for directory in _DIRECTORIES:
            for name in names_in(join_root(root, directory)):
                yield f"{directory}/{name}"

    def _is_right(self, name: str, wanted: HostNode) -> bool:
        link = os.path.join(self.directory, name)  # noqa: PTH118  runs in each Prepare
        try:
            target = os.readlink(link)  # noqa: PTH115
        except FileNotFoundError:
            return False
        except OSError:
            return True  # not a link, or unreadable: do not change it
        if target == self._target(wanted):
            return True
        there = self._nodes.read(os.path.normpath(os.path.join(self.directory, target)))  # noqa: PTH118
        return there is not None and (there.major, there.minor) == (wanted.node.major, wanted.node.minor)

    def _target(self, node: HostNode) -> str:
        """Return a relative target for a node in the host's own /dev, as udev does."""
        own = f"{join_root(self._root, '/dev')}/"
        return f"../{node.host_path.removeprefix(own)}" if node.host_path.startswith(own) else node.host_path


@dataclass(frozen=True, slots=True)
class FoundHostDevice:
    nodes: tuple[HostNode, ...] = ()
    mounts: tuple[CdiMount, ...] = ()


class HostDeviceFinder:
    """Reads the host's nodes at each call, because kernel modules come and go."""

    def __init__(self, paths: HostPaths, nodes: DeviceNodeReader) -> None:
        # Other vendors' modules create their nodes in the host's /dev, whatever the driver root contains.
        host = DevRoot(replace(paths, dev_root=paths.dev_root or "/"), nodes)
        self._dev = (host, DevRoot(paths, nodes))
        self._paths = paths

    def find(self, kind: HostDevice) -> FoundHostDevice:
        for dev in self._dev:
            paths = dict.fromkeys(
                path for pattern in HOST_DEVICE_NODES[kind] for path in _matches(dev.root, pattern)
            )
            nodes = tuple(node for path in paths if (node := dev.node(path)) is not None)
            if nodes:
                return FoundHostDevice(nodes, tuple(self._mounts(kind)))
        return FoundHostDevice()

    def _mounts(self, kind: HostDevice) -> Iterator[CdiMount]:
        paths = self._paths
        root, on_host = (
            (paths.host_root, "/")
            if paths.host_root is not None
            else (paths.driver_root, paths.host_driver_root)
        )
        tree = RootedTree(root)
        for path in HOST_DEVICE_FILES.get(kind, ()):
            found = tree.directory(path) or tree.file(path)
            if found is not None:
                yield CdiMount(join_root(on_host, found), path, _MOUNT_OPTIONS)


def _matches(root: str, pattern: str) -> list[str]:
    directory, _, name = pattern.rpartition("/")
    if "*" not in name:
        return [pattern]
    return [f"{directory}/{one}" for one in names_in(join_root(root, directory)) if fnmatchcase(one, name)]
