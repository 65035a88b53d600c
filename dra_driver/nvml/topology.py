"""Which pairs of GPUs reach each other over NVLink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations

import pynvml

from dra_driver.errors import DeviceLostError, DraDriverError
from dra_driver.model.gpu import Fabric, Gpu
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.nvml.calls import NOT_ANSWERED, GpuWalk, Handle, supported
from dra_driver.nvml.mig_reading import mig_mode
from dra_driver.nvml.readings import FaultLog, link_states

_SWITCH = "switch"


class PeerMemory:
    """What was last read of each GPU while its MIG mode was off.

    MIG mode switches peer access off. Without this memory a GPU that is in MIG mode only until someone wants it whole
    would leave its NVLink domain and come back all the time. The mode may change at any moment, so that a reading
    counts only if the mode was off before and after it.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, tuple[int | None, Fabric | None]] = {}
        self._remotes: dict[tuple[str, int], str] = {}
        self.pairs: dict[frozenset[str], int] = {}

    def reopened(self) -> None:
        """NVML was initialised again: what a driver never changes while it is loaded may be different now."""
        self._remotes.clear()

    def recalled(self, handle: Handle, gpu: Gpu) -> Gpu:
        """The GPU with links and fabric as they were out of MIG mode, where that is known."""
        if _is_out_of_mig_mode(handle, gpu):
            self._gpus[gpu.uuid] = (gpu.nvlink_links, gpu.fabric)
            return gpu
        links, fabric = self._gpus.get(gpu.uuid, (gpu.nvlink_links, None))
        gpu = replace(gpu, nvlink_links=links)
        # A registration that was under way before the mode may be complete since.
        return gpu if gpu.fabric or fabric is None else replace(gpu, fabric=fabric, unready_fabric=None)

    def remote(self, handle: Handle, gpu: Gpu, link: int) -> str | None:
        """Where a link leads: a PCI bus ID or a switch. It depends on wires alone and is read once. None where the
        driver does not say."""
        key = (gpu.uuid, link)
        known = self._remotes.get(key)
        if known is None:
            known = _remote(handle, link)
            if known is not None:
                self._remotes[key] = known
        return known


Pairs = dict[frozenset[str], int]


@dataclass(frozen=True, slots=True)
class _PeerAnswers:
    """The NVLinks of one GPU: the results of `_remotes` and, by the UUID of the other GPU, of `_peer_access`; and
    whether its MIG mode was off before and after."""

    remotes: Mapping[str, int] | None
    granted: Mapping[str, bool | None]
    is_out_of_mig_mode: bool
    faults: Sequence[DiscoveryFault]


def read_reachable_pairs(
    gpus: Mapping[int, tuple[Handle, Gpu]],
    memory: PeerMemory,
    silent: Sequence[Gpu],
    walk: GpuWalk,
) -> tuple[Pairs, list[DiscoveryFault]]:
    """Pairs of GPU UUIDs with NVLink peer access, and the number of links that join them directly; and what could not
    be read. `gpus` is by NVML index; `walk` is that of `read_gpus`.

    The NVIDIA driver's answer on peer access decides, because it knows of switch partitions; where it has none, the
    links decide. Behind a switch the count is 1, because every pair is equal there. For GPUs that are in MIG mode now
    and can be whole again, for `silent` GPUs, which are not called, and for a pair whose query fails or does not
    return, the answer in `memory` counts. A pair of which nothing was ever read has no peer access, and is a fault."""
    linked = {
        index: (handle, gpu) for index, (handle, gpu) in gpus.items() if gpu.nvlink_links and gpu.can_be_whole
    }
    pairs_of_linked = list(combinations([gpu for _, gpu in linked.values()], 2))
    out_of_mig_mode = {gpu.uuid for _, gpu in linked.values() if not gpu.mig_enabled}
    asked = {
        gpu.uuid
        for pair in pairs_of_linked
        for gpu in pair
        if {one.uuid for one in pair} <= out_of_mig_mode
        or frozenset(one.uuid for one in pair) not in memory.pairs
    }

    def read(index: int) -> _PeerAnswers:
        handle, gpu = linked[index]
        faults: list[DiscoveryFault] = []
        granted: dict[str, bool | None] = {}
        remotes = _remotes(handle, gpu, memory)
        # Each pair is asked once, of the GPU that comes first; the mode of the other is looked at later.
        others = list(linked)[list(linked).index(index) + 1 :]
        for other_handle, other in (linked[later] for later in others):
            if not {gpu.uuid, other.uuid} <= out_of_mig_mode:
                continue
            try:
                granted[other.uuid] = _peer_access(handle, other_handle)
            except DraDriverError as error:
                text = f"NVLink peer access to GPU {other.uuid}: {error}"
                faults.append(DiscoveryFault(f"GPU {gpu.uuid}", text))
        return _PeerAnswers(remotes, granted, _is_out_of_mig_mode(handle, gpu), faults)

    answers = walk.each([index for index, (_, gpu) in linked.items() if gpu.uuid in asked], read)
    found: dict[str, _PeerAnswers] = {}
    faults: list[DiscoveryFault] = []
    for index, (_, gpu) in linked.items():
        if index in answers:
            found[gpu.uuid] = answers[index].result()
            faults += found[gpu.uuid].faults
        elif gpu.uuid in asked:
            faults.append(DiscoveryFault(f"GPU {gpu.uuid}", f"NVLink peer access: {NOT_ANSWERED}"))
    changed_mode = {uuid for uuid, answer in found.items() if not answer.is_out_of_mig_mode}
    pairs: Pairs = {}
    for a, b in pairs_of_linked:
        links = _links_of_pair(a, b, found, out_of_mig_mode - changed_mode, memory)
        if links:
            pairs[frozenset((a.uuid, b.uuid))] = links
    return pairs | _pairs_of_silent([gpu for _, gpu in gpus.values()], silent, memory), faults


def _links_of_pair(
    a: Gpu, b: Gpu, found: Mapping[str, _PeerAnswers], out_of_mig_mode: Set[str], memory: PeerMemory
) -> int:
    """As `_links`, from the answers of both GPUs, which are kept in `memory`; where they do not count, from there."""
    pair = frozenset((a.uuid, b.uuid))
    of_a, of_b = found.get(a.uuid, _UNREAD), found.get(b.uuid, _UNREAD)
    remotes = of_a.remotes or {}, of_b.remotes or {}
    could_be_read = b.uuid in of_a.granted and of_a.remotes is not None and of_b.remotes is not None
    if pair <= out_of_mig_mode and could_be_read:
        memory.pairs[pair] = _links(*remotes, b, of_a.granted[b.uuid])
    elif pair not in memory.pairs:
        return 0 if pair <= out_of_mig_mode else _links(*remotes, b, None)
    return memory.pairs[pair]


_UNREAD = _PeerAnswers(None, {}, False, ())


def _pairs_of_silent(others: Sequence[Gpu], silent: Sequence[Gpu], memory: PeerMemory) -> Pairs:
    """The pairs of GPUs that do not answer, as they were read last."""
    shown = {gpu.uuid for gpu in (*others, *silent)}
    uuids = {gpu.uuid for gpu in silent}
    return {pair: links for pair, links in memory.pairs.items() if links and pair & uuids and pair <= shown}


def _links(of_a: Mapping[str, int], of_b: Mapping[str, int], b: Gpu, granted: bool | None) -> int:
    """The links that join two GPUs, 1 if it is through switches; 0 where the NVIDIA driver does not grant peer
    access."""
    direct = of_a.get(b.pci_bus_id or "", 0)
    reached = granted if granted is not None else bool(direct or (_SWITCH in of_a and _SWITCH in of_b))
    return max(direct, 1) if reached else 0


def _is_out_of_mig_mode(handle: Handle, gpu: Gpu) -> bool:
    """Whether MIG mode was off when the GPU was read and still is. Only on a GPU that is cut on demand may it change
    between the two."""
    if gpu.mig_enabled:
        return False
    if gpu.partitioning is None:
        return True
    try:
        mode = mig_mode(handle, gpu.uuid)
    except DraDriverError:
        return False
    return mode is None or not mode[0]


def _peer_access(a: Handle, b: Handle) -> bool | None:
    """Whether the NVIDIA driver grants peer access over NVLink; None if it does not support the query. Raises:
    DraDriverError if the query fails."""
    status = supported(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return None if status is None else bool(status == pynvml.NVML_P2P_STATUS_OK)


def _remotes(handle: Handle, gpu: Gpu, memory: PeerMemory) -> Mapping[str, int] | None:
    """Active links of a GPU by what is at their other end: a PCI bus ID, or a switch. None if they cannot be read."""
    log = FaultLog(f"GPU {gpu.uuid}")
    try:
        states = link_states(log, handle)
    except DeviceLostError:
        return {}  # lost since it was read; it must not take the others along, and the next scan leaves it out
    if log.faults:
        return None
    remotes: dict[str, int] = {}
    for link, is_up in enumerate(states):
        remote = memory.remote(handle, gpu, link) if is_up else None
        if remote is not None:
            remotes[remote] = remotes.get(remote, 0) + 1
    return remotes


def _remote(handle: Handle, link: int) -> str | None:
    """Where a link leads; None where the NVIDIA driver does not say."""
    try:
        kind = supported(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        info = supported(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return None if info is None else pci_bus_id(info.busId)
    except (DraDriverError, ValueError):
        return None
