"""Extra devices for a claim's containers. IMEX channels are looked for before the first step, and again for the spec.

| A crash, or a node that vanishes | leaves | Undo |
|---|---|---|
| before the first step | nothing: the claim has no record | none |
| between the first step and the spec | the record of the other steps | the rollback of the failed Prepare |
| after the spec was written | the spec; containers that start later lack the node | the next Prepare writes it again |

Nothing here changes the host, so there is nothing to undo.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import structlog

from dra_driver.host.device_nodes import DeviceNodeReader, HostDeviceFinder
from dra_driver.host.imex import ImexChannelNodes, ImexDaemon
from dra_driver.model.driver_files import CdiDevice, CdiMount, FindPrograms, HostNode
from dra_driver.model.host import HOST_DEVICE_NODES, HOST_DEVICE_REMEDIES, HostDevice, HostPaths, ImexChannels
from dra_driver.model.plan import Plan, PlannedDevice

_log = structlog.get_logger(__name__)


class ExtraDeviceFinder:
    """Finds extra devices on the host; no one asks for a plan that has none."""

    def __init__(
        self, paths: HostPaths, programs: FindPrograms, *, nodes: DeviceNodeReader | None = None
    ) -> None:
        self._finder = HostDeviceFinder(paths, nodes=nodes)
        self._channels = ImexChannelNodes(paths.proc)
        self._daemon = ImexDaemon(paths, programs)
        self._lock = threading.Lock()
        self._told: set[HostDevice] = set()

    def check(self, plan: Plan) -> None:
        """Raises: RetryableError if the NVIDIA driver has no channels for a claim that needs them."""
        channels = channels_of(plan)
        if channels is not None:
            self._channels.nodes(channels)

    def refuse_unready_imex(self, timeout_s: float) -> None:
        """Raises: RetryableError unless the host's nvidia-imex says in time that it is ready."""
        self._daemon.refuse_unready(timeout_s)

    def added(self, device: CdiDevice, planned: PlannedDevice) -> CdiDevice:
        """The device with the nodes of its extra devices, as far as the host has them."""
        for kind in planned.host_devices:
            found = self._finder.find(kind)
            self._tell(kind, is_there=bool(found.nodes))
            device = with_host_devices(device, found.nodes, found.mounts)
        return device

    def channel_nodes(self, plan: Plan) -> tuple[HostNode, ...]:
        """The channels of a claim on GPUs in a fabric. Raises: RetryableError if the NVIDIA driver has none."""
        channels = channels_of(plan)
        if channels is None:
            return ()
        return tuple(HostNode(node, node.path) for node in self._channels.nodes(channels))

    def _tell(self, kind: HostDevice, *, is_there: bool) -> None:
        """Log what the node lacks: once, and again when it was there meanwhile."""
        with self._lock:
            if is_there:
                self._told.discard(kind)
                return
            if kind in self._told:
                return
            self._told.add(kind)
        _log.warning("host_devices_missing", notes=[note(kind)])


def channels_of(plan: Plan) -> ImexChannels | None:
    """The channels of a plan: those of its devices, which come from one configuration."""
    return next((planned.imex for planned in plan.devices if planned.imex is not None), None)


def with_host_devices(device: CdiDevice, nodes: Sequence[HostNode], mounts: Sequence[CdiMount]) -> CdiDevice:
    """The device with nodes and mounts that the device does not have yet."""
    here = {node.node.path for node in (*device.nodes, *device.drm)}
    return replace(
        device,
        nodes=(*device.nodes, *(node for node in nodes if node.node.path not in here)),
        mounts=(*device.mounts, *mounts),
    )


def note(kind: HostDevice) -> str:
    """The sentence for a node that lacks what its configuration gives to claims."""
    paths = HOST_DEVICE_NODES[kind][-1:] if kind == "nvswitch" else HOST_DEVICE_NODES[kind]
    missing, remedy = " and no ".join(paths), HOST_DEVICE_REMEDIES[kind]
    return f"hostDevices {kind} of the configuration: this node has no {missing}; {remedy}"
