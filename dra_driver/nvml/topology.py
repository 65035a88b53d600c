"""Which pairs of GPUs reach each other over NVLink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pynvml

from dra_driver.errors import DeviceLostError, DraDriverError
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import pci_bus_id
from dra_driver.nvml.failures import supported
from dra_driver.nvml.readings import FaultLog, link_states

Handle = Any

_SWITCH = "switch"


def read_reachable_pairs(gpus: Sequence[tuple[Handle, Gpu]]) -> dict[frozenset[str], int]:
    """Pairs of GPU UUIDs with NVLink peer access, and the number of links that join them directly.

    The driver's own word on peer access decides, since it knows of switch partitions; where it has none,
    the links do. Behind a switch the count is 1, because every pair is equal there.
    """
    linked = [(handle, gpu) for handle, gpu in gpus if gpu.nvlink_links and not gpu.mig_enabled]
    remotes = {gpu.uuid: _remotes(handle, gpu) for handle, gpu in linked}
    pairs: dict[frozenset[str], int] = {}
    for (handle_a, a), (handle_b, b) in combinations(linked, 2):
        direct = remotes[a.uuid].get(b.pci_bus_id or "", 0)
        switched = _SWITCH in remotes[a.uuid] and _SWITCH in remotes[b.uuid]
        peer = _peer_access(handle_a, handle_b)
        if peer if peer is not None else (direct or switched):
            pairs[frozenset((a.uuid, b.uuid))] = max(direct, 1)
    return pairs


def _peer_access(a: Handle, b: Handle) -> bool | None:
    """Whether the driver grants peer access over NVLink; None if it cannot tell."""
    try:
        status = supported(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except DraDriverError:
        return None
    return None if status is None else bool(status == pynvml.NVML_P2P_STATUS_OK)


def _remotes(handle: Handle, gpu: Gpu) -> Mapping[str, int]:
    """Active links of a GPU by what is at their other end: a PCI bus ID, or a switch."""
    try:
        states = link_states(FaultLog(f"GPU {gpu.uuid}"), handle)
    except DeviceLostError:
        return {}  # lost since it was read; it must not take the others along, and the next scan leaves it out
    remotes: dict[str, int] = {}
    for link, is_up in enumerate(states):
        remote = _remote(handle, link) if is_up else None
        if remote is not None:
            remotes[remote] = remotes.get(remote, 0) + 1
    return remotes


def _remote(handle: Handle, link: int) -> str | None:
    """Where a link leads; None where the driver does not say."""
    try:
        kind = supported(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        info = supported(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return None if info is None else pci_bus_id(info.busId)
    except (DraDriverError, ValueError):
        return None
