"""The device nodes through which a container reaches one GPU or MIG device."""

from __future__ import annotations

from collections.abc import Iterable

from dra_driver.errors import RetryableError
from dra_driver.host.capability_nodes import MigCaps
from dra_driver.host.device_nodes import DeviceNodeReader, DevRoot, LstatDeviceNodeReader
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.driver_files import CdiDevice, HostNode
from dra_driver.model.host import HostPaths


class GpuNodes:
    """Looks nodes up on the host at each call; it is an error if a node that the device needs is missing."""

    def __init__(self, paths: HostPaths, *, nodes: DeviceNodeReader | None = None) -> None:
        self._dev = DevRoot(paths, nodes or LstatDeviceNodeReader())
        self._sysfs = Sysfs(paths.sys, paths.proc)
        self._caps = MigCaps(paths.proc)

    def minor(self, bus_id: str) -> int | None:
        """The number in the name of the GPU's node now; None if it is not known."""
        return self._sysfs.gpu_minor(bus_id)

    def whole_gpu(self, name: str, minor: int | None, bus_id: str | None) -> CdiDevice:
        """The device `name`: a whole GPU, with its graphics nodes if the host has them.

        Raises: RetryableError if the GPU's node is not on the host.
        """
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
        """The device `name`, a MIG device; `minor` and `bus_id` are its GPU's, `graphics` is for `+gfx`.

        Raises: RetryableError if the GPU's node or the instance is not there.
        """
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
        """The nodes through which an agent manages GPUs and their MIG devices, and what the host lacks of them: an
        agent is wanted on a node with a bad GPU too. `has_mig` says whether one of the GPUs can have MIG devices.

        Raises: RetryableError if the NVIDIA driver is being loaded or unloaded.
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
