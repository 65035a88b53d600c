"""The device nodes through which a container accesses a GPU or MIG device.

A MIG device's nodes need not exist on the host: their numbers are read from /proc.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path

from dra_driver.errors import RetryableError
from dra_driver.host.device_nodes import DeviceNodeMaker, DeviceNodeReader, DevRoot
from dra_driver.host.rooted_tree import join_root, text_of
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.driver_files import CdiDevice, HostNode
from dra_driver.model.host import DeviceNode, HostPaths

_MIG_MAJOR_NAME = "nvidia-caps"
_MANAGEMENT = ("mig/config", "mig/monitor")
_MINOR = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,10})\s*$", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,10}")
_MODE = re.compile(r"^DeviceFileMode:\s*([0-9]{1,10})\s*$", re.MULTILINE)
_LEFT_ALONE = re.compile(r"^DeviceFileModify:\s*0\s*$", re.MULTILINE)
_CAPABILITIES = "/proc/driver/nvidia/capabilities"


class MigCaps:
    """Methods raise RetryableError if there is no such instance or capability interface, or no major number."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = Path(proc)

    def majors(self) -> dict[str, int]:
        text = text_of(self._proc / "devices")
        majors: dict[str, int] = {}
        for line in text.partition("Block devices:")[0].splitlines():
            number, _, name = line.strip().partition(" ")
            if _NUMBER.fullmatch(number) and name:
                majors.setdefault(name.strip(), int(number))
        return majors

    def nodes(
        self, gpu_minor: int, gpu_instance: int, compute_instance: int
    ) -> tuple[DeviceNode, DeviceNode]:
        major = self._major()
        access = f"gpu{gpu_minor}/mig/gi{gpu_instance}/access"
        inside = f"gpu{gpu_minor}/mig/gi{gpu_instance}/ci{compute_instance}/access"
        return (
            self._node(major, access, self._read(access)),
            self._node(major, inside, self._read(inside)),
        )

    def all_nodes(self) -> list[tuple[str, DeviceNode]]:
        """Return the nodes of all instances, with their capability paths, except nodes that the NVIDIA driver leaves to
        the administrator.
        """
        top = self._proc / "driver/nvidia/capabilities"
        found = sorted(top.glob("gpu*/mig/gi*/access")) + sorted(top.glob("gpu*/mig/gi*/ci*/access"))
        major = self._major() if found else 0
        nodes = []
        for path in found:
            capability = str(path.relative_to(top))
            try:
                text = self._read(capability)
            except RetryableError:
                continue  # the instance was just destroyed
            if not _LEFT_ALONE.search(text):
                nodes.append((capability, self._node(major, capability, text)))
        return nodes

    def management_nodes(self) -> list[DeviceNode]:
        """Return the nodes that configure and monitor MIG, and those of all instances, which both tasks require."""
        nodes = []
        for capability in _MANAGEMENT:
            try:
                text = self._read(capability)
            except RetryableError:
                continue
            nodes.append(self._node(self._major(), capability, text))
        return nodes + [node for _, node in self.all_nodes()]

    def exist(self, gpu_minor: int, gpu_instance: int, compute_instance: int) -> bool:
        instance = self._proc / f"driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gpu_instance}"
        return (instance / f"ci{compute_instance}/access").exists()

    def _major(self) -> int:
        major = self.majors().get(_MIG_MAJOR_NAME)
        if major is None:
            raise RetryableError(
                f"the kernel lists no {_MIG_MAJOR_NAME} devices in {self._proc / 'devices'}: "
                "the NVIDIA driver is not loaded or was loaded without MIG capabilities"
            )
        return major

    def _path(self, capability: str) -> Path:
        return self._proc / "driver/nvidia/capabilities" / capability

    def _read(self, capability: str) -> str:
        try:
            return self._path(capability).read_text("ascii", errors="replace")
        except OSError as error:
            raise RetryableError(
                f"the NVIDIA driver has no MIG capability {capability} ({error.strerror}): "
                "the MIG device was destroyed or the NVIDIA driver is being reloaded"
            ) from error

    def _node(self, major: int, capability: str, text: str) -> DeviceNode:
        minor = _MINOR.search(text)
        mode = _MODE.search(text)
        if minor is None or mode is None:
            raise RetryableError(
                f"the MIG capability {capability} is not usable: {self._path(capability)} does not name a device file"
            )
        return DeviceNode(
            path=f"/dev/nvidia-caps/nvidia-cap{minor[1]}",
            type="c",
            major=major,
            minor=int(minor[1]),
            mode=int(mode[1]) & 0o777,
        )


class CapabilityNodes:
    """MIG device nodes, which CUDA programs on the host need; containers do not."""

    def __init__(self, caps: MigCaps, root: str, maker: DeviceNodeMaker) -> None:
        self._caps = caps
        self._root = root
        self._maker = maker
        self._lock = threading.Lock()

    def make_missing(self) -> None:
        """Create a node for every existing instance, as nvidia-smi does.

        Replaces nodes from before a reload of the NVIDIA driver. Raises: RetryableError.
        """
        with self._lock:
            for capability, node in self._caps.all_nodes():
                try:
                    self._have(join_root(self._root, node.path), node)
                except OSError as error:
                    raise RetryableError(
                        f"cannot create the device node {_named(node)}: {error.strerror or error}; "
                        "run the MPS host as root with the host's /dev (in a pod: privileged), "
                        f"or run `nvidia-modprobe -f {_CAPABILITIES}/{capability}` on the node"
                    ) from error

    def _have(self, path: str, node: DeviceNode) -> None:
        try:
            self._maker.make(path, node)
        except FileExistsError:
            there = self._maker.read(path)
            if there is None or there.type != node.type:
                raise RetryableError(
                    f"cannot create the device node {_named(node)}: another file has this path; remove that file, "
                    "and find out what created it"
                ) from None
            if (there.major, there.minor) != (node.major, node.minor):
                self._maker.remove(path)
                self._maker.make(path, node)


def _named(node: DeviceNode) -> str:
    return f"{node.path} ({node.type} {node.major}:{node.minor})"


class GpuNodes:
    """Looks up nodes on the host at each call. Raises: RetryableError if a required node is missing."""

    def __init__(self, paths: HostPaths, nodes: DeviceNodeReader) -> None:
        self._dev = DevRoot(paths, nodes)
        self._sysfs = Sysfs(paths.sys, paths.proc)
        self._caps = MigCaps(paths.proc)

    def minor(self, bus_id: str) -> int | None:
        return self._sysfs.gpu_minor(bus_id)

    def whole_gpu(self, name: str, minor: int | None, bus_id: str | None) -> CdiDevice:
        """Return the CDI device `name`, with graphics nodes if the host has them."""
        node = self._gpu_node(name, _known(name, minor))
        drm, links = self._drm(bus_id)
        return CdiDevice(name=name, nodes=(node,), drm=drm, links=links)

    def mig_device(
        self,
        name: str,
        minor: int | None,
        bus_id: str | None,
        gpu_instance: int,
        compute_instance: int,
        *,
        graphics: bool = False,
    ) -> CdiDevice:
        """Return the CDI device `name`; `graphics` adds graphics nodes, for `+gfx` profiles."""
        gpu_minor = _known(name, minor)
        node = self._gpu_node(name, gpu_minor)
        caps = self._caps.nodes(gpu_minor, gpu_instance, compute_instance)
        drm, links = self._drm(bus_id) if graphics else ((), ())
        return CdiDevice(
            name=name, nodes=(node, *(HostNode(cap, cap.path) for cap in caps)), drm=drm, links=links
        )

    def management(
        self, minors: Iterable[int | None], *, has_mig: bool
    ) -> tuple[tuple[HostNode, ...], tuple[str, ...]]:
        """Return the nodes with which an agent manages GPUs and their MIG devices, and the paths of missing nodes.

        Missing nodes are not an error: an agent is needed even if a GPU is bad. Raises: RetryableError while the NVIDIA
        driver is loaded or unloaded.
        """
        wanted = [f"/dev/nvidia{minor}" for minor in minors if minor is not None]
        found = [(path, self._dev.node(path)) for path in wanted]
        caps = self._caps.management_nodes()
        missing = [path for path, node in found if node is None]
        if has_mig and not caps:
            missing.append("the MIG capabilities of the NVIDIA driver (/proc/driver/nvidia/capabilities/mig)")
        return (
            (
                *(node for _, node in found if node is not None),
                *(HostNode(cap, cap.path) for cap in caps),
            ),
            tuple(missing),
        )

    def _gpu_node(self, name: str, minor: int) -> HostNode:
        node = self._dev.node(f"/dev/nvidia{minor}")
        if node is None:
            raise RetryableError(
                f"device node /dev/nvidia{minor} of {name} is missing on the host: run "
                f"`nvidia-modprobe -c={minor}` there or start nvidia-persistenced"
            )
        return node

    def _drm(self, bus_id: str | None) -> tuple[tuple[HostNode, ...], tuple[tuple[str, str], ...]]:
        nodes = []
        links = []
        for name in self._sysfs.drm_nodes(bus_id) if bus_id is not None else ():
            node = self._dev.node(f"/dev/dri/{name}")
            if node is not None:
                nodes.append(node)
                kind = "card" if name.startswith("card") else "render"
                links.append((f"/dev/dri/by-path/pci-{bus_id}-{kind}", f"../{name}"))
        return tuple(nodes), tuple(links)


def _known(name: str, minor: int | None) -> int:
    if minor is None:
        raise RetryableError(
            f"the NVIDIA driver does not report the device minor of {name}, so its device node is not "
            "known; see `nvidia-smi -q` on the host"
        )
    return minor
