"""Extra devices as a CDI spec has them, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dra_driver.errors import RetryableError
from dra_driver.model.driver_files import CdiDevice, CdiMount, HostNode
from dra_driver.model.extra_devices import NODE_PATTERNS, REMEDIES, HostDevice
from dra_driver.model.plan import PlannedDevice


def with_host_devices(device: CdiDevice, nodes: Sequence[HostNode], mounts: Sequence[CdiMount]) -> CdiDevice:
    """The device with nodes and mounts that the device does not have yet."""
    here = {node.node.path for node in (*device.nodes, *device.drm)}
    return replace(
        device,
        nodes=(*device.nodes, *(node for node in nodes if node.node.path not in here)),
        mounts=(*device.mounts, *mounts),
    )


def refused(planned: PlannedDevice, kind: HostDevice) -> RetryableError:
    """The error for what a claim's parameters ask for and the node does not have."""
    return RetryableError(
        f"request {planned.result.request}: its parameters ask for hostDevices {kind}, but this node has no "
        f"{patterns(kind)}; {REMEDIES[kind]}, or remove {kind} from the parameters"
    )


def note(kind: HostDevice) -> str:
    """What is said where the node's configuration asks for what the node does not have."""
    return f"hostDevices {kind} of the configuration: this node has no {patterns(kind)}; {REMEDIES[kind]}"


def patterns(kind: HostDevice) -> str:
    """The paths of the kind's nodes."""
    return " and no ".join(NODE_PATTERNS[kind][-1:] if kind == "nvswitch" else NODE_PATTERNS[kind])
