"""Device nodes of the host that serve containers beside a GPU: RDMA, GPUDirect Storage, GDRCopy, NVSwitches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from dra_driver.host.device_nodes import DeviceNodeReader, DevRoot, LstatDeviceNodeReader
from dra_driver.host.reading import names_in
from dra_driver.host.rooted_tree import RootedTree, join_root
from dra_driver.model.driver_files import CdiMount, HostNode
from dra_driver.model.extra_devices import FILES, NODE_PATTERNS, HostDevice
from dra_driver.model.host import HostPaths

_MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")


@dataclass(frozen=True, slots=True)
class FoundHostDevice:
    """What the host has of one kind: no nodes, then nothing at all."""

    nodes: tuple[HostNode, ...] = ()
    mounts: tuple[CdiMount, ...] = ()


class HostDeviceFinder:
    """Looks at the host at each call: kernel modules are loaded and unloaded while pods come and go."""

    def __init__(self, paths: HostPaths, *, nodes: DeviceNodeReader | None = None) -> None:
        reader = nodes or LstatDeviceNodeReader()
        # Kernel modules of others make their nodes in the host's /dev, whatever the driver root has.
        host = DevRoot(replace(paths, dev_root=paths.dev_root or "/"), reader)
        self._dev = (host, DevRoot(paths, reader))
        self._paths = paths

    def find(self, kind: HostDevice) -> FoundHostDevice:
        """The nodes of a kind that exist, and the files that go with them."""
        for dev in self._dev:
            paths = dict.fromkeys(
                path for pattern in NODE_PATTERNS[kind] for path in _matches(dev.root, pattern)
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
        for path in FILES.get(kind, ()):
            found = tree.directory(path) or tree.file(path)
            if found is not None:
                yield CdiMount(join_root(on_host, found), path, _MOUNT_OPTIONS)


def _matches(root: str, pattern: str) -> list[str]:
    directory, _, name = pattern.rpartition("/")
    if "*" not in name:
        return [pattern]
    return [f"{directory}/{one}" for one in names_in(join_root(root, directory)) if fnmatchcase(one, name)]
