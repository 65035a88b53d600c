"""Scans the node's GPUs through NVML, and finds which pairs of GPUs reach each other over NVLink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import combinations

import pynvml

from dra_driver.errors import (
    DeviceLostError,
    DraDriverError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.model.dataclass import dataclass, field, replace
from dra_driver.model.gpu import READINGS, Fabric, Gpu, Reading
from dra_driver.model.host import GpuFingerprint, NvmlFingerprint
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.inventory import ConfidentialMode, DiscoveryFault, DriverVersions, Inventory
from dra_driver.model.mig import GpuInstance, MigProfile
from dra_driver.nvml.calls import NOT_ANSWERED, GpuWalk, Handle, nvml_errors, supported
from dra_driver.nvml.mig_reading import PartitionReader, Tables, is_mig_on, read_mig_devices, read_profiles
from dra_driver.nvml.readings import NOT_GPUS, FaultLog, confidential_mode, link_states, read_gpu, read_values

_SWITCH = "switch"


class PeerMemory:
    """The last NVLink reading of each GPU while its MIG mode was off.

    MIG mode disables peer access. Without this memory a GPU that is only temporarily in MIG mode would repeatedly leave
    and rejoin its NVLink domain. A reading counts only if MIG mode was off before and after it.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, tuple[int | None, Fabric | None]] = {}
        self._remotes: dict[tuple[str, int], str] = {}
        self.pairs: dict[frozenset[str], int] = {}

    def reopened(self) -> None:
        self._remotes.clear()

    def recalled(self, handle: Handle, gpu: Gpu) -> Gpu:
        if _is_out_of_mig_mode(handle, gpu):
            self._gpus[gpu.uuid] = (gpu.nvlink_links, gpu.fabric)
            return gpu
        links, fabric = self._gpus.get(gpu.uuid, (gpu.nvlink_links, None))
        gpu = replace(gpu, nvlink_links=links)
        # A registration that was pending before MIG mode may have completed since.
        return gpu if gpu.fabric or fabric is None else replace(gpu, fabric=fabric, unready_fabric=None)

    def remote(self, handle: Handle, gpu: Gpu, link: int) -> str | None:
        """Read the other end of a link only once, because it depends only on the wiring."""
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
    """Return the number of links of each pair of GPU UUIDs with NVLink peer access, and a fault for each failed read.

    The NVIDIA driver's report on peer access takes precedence, because it accounts for switch partitions; without a
    report, the links decide. Behind a switch the count is 1. `memory` answers for GPUs that are in MIG mode but can be
    whole again, for `silent` GPUs, which are not called, and for pairs whose query fails. For a pair that was never
    read, the links decide if one GPU is in MIG mode; otherwise it counts as without peer access.
    """
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
        # Each pair is queried once, on the GPU that comes first; the other GPU's mode is checked later.
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
    shown = {gpu.uuid for gpu in (*others, *silent)}
    uuids = {gpu.uuid for gpu in silent}
    return {pair: links for pair, links in memory.pairs.items() if links and pair & uuids and pair <= shown}


def _links(of_a: Mapping[str, int], of_b: Mapping[str, int], b: Gpu, granted: bool | None) -> int:
    """Return 1 through switches; 0 if the NVIDIA driver does not grant peer access."""
    direct = of_a.get(b.pci_bus_id or "", 0)
    reached = granted if granted is not None else bool(direct or (_SWITCH in of_a and _SWITCH in of_b))
    return max(direct, 1) if reached else 0


def _is_out_of_mig_mode(handle: Handle, gpu: Gpu) -> bool:
    """Whether MIG mode was off when the GPU was read and still is. It changes only on GPUs with MIG on demand."""
    if gpu.mig_enabled:
        return False
    if gpu.partitioning is None:
        return True
    try:
        return not is_mig_on(handle, gpu.uuid)
    except DraDriverError:
        return False


def _peer_access(a: Handle, b: Handle) -> bool | None:
    status = supported(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return None if status is None else bool(status == pynvml.NVML_P2P_STATUS_OK)


def _remotes(handle: Handle, gpu: Gpu, memory: PeerMemory) -> Mapping[str, int] | None:
    try:
        states = link_states(handle)
    except DeviceLostError:
        return {}  # lost since it was read: continue with the others; the next scan omits it
    except NvmlUnavailableError:
        raise
    except DraDriverError:
        return None
    remotes: dict[str, int] = {}
    for link, is_up in enumerate(states):
        remote = memory.remote(handle, gpu, link) if is_up else None
        if remote is not None:
            remotes[remote] = remotes.get(remote, 0) + 1
    return remotes


def _remote(handle: Handle, link: int) -> str | None:
    try:
        kind = supported(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        info = supported(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return None if info is None else pci_bus_id(info.busId)
    except (DraDriverError, ValueError):
        return None


ForeignInstances = Callable[[str, Sequence[GpuInstance]], Sequence[GpuInstance]]
"""Return the instances on a GPU (given by UUID) that this plugin did not create. Raises: StateError."""


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """What one scan keeps for the next. Only one thread may use it at a time.

    `known` is by UUID; `uuids`, `handles` and `fingerprints` are by NVML index in the current opening.
    """

    partitions: PartitionReader = field(default_factory=PartitionReader)
    peers: PeerMemory = field(default_factory=PeerMemory)
    profiles: Tables[dict[int, MigProfile]] = field(default_factory=lambda: Tables(read_profiles))
    walk: GpuWalk = field(default_factory=GpuWalk)
    known: dict[str, Gpu] = field(default_factory=dict)
    uuids: dict[int, str] = field(default_factory=dict)
    handles: dict[int, tuple[Handle, str]] = field(default_factory=dict)
    fingerprints: dict[int, GpuFingerprint | None] = field(default_factory=dict)

    def reopened(self) -> None:
        self.peers.reopened()
        self.uuids.clear()
        self.handles.clear()
        self.fingerprints.clear()


def read_gpus(
    on_demand: Callable[[Gpu], bool] | None,
    memory: ScanMemory,
    foreign_instances: ForeignInstances | None,
) -> Inventory:
    """Return all GPUs in PCI order, without NVLink domains.

    GPUs that do not answer are faults. GPUs and values that cannot be read now are returned as last read; lost GPUs are
    omitted. GPUs that `on_demand` selects get a `partitioning`, with all existing GPU instances as `withheld`. Their
    MIG devices are those in the instances that `foreign_instances` returns (None: all).

    Raises: NvmlUnavailableError if NVML itself does not answer; the errors of `foreign_instances`.
    """
    log = FaultLog("NVML")
    versions = _read_versions(log)
    confidential = _confidential_mode(log)
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    found: dict[int, tuple[Handle, Gpu]] = {}
    faults = log.faults
    unread = memory.partitions.unread
    unread.clear()

    def read(index: int) -> tuple[Handle, Gpu, list[DiscoveryFault]]:
        handle, gpu, log = read_gpu(index)
        gpu_faults = log.faults
        gpu = _with_known(gpu, log, memory.known.get(gpu.uuid), unread)
        if on_demand is not None and on_demand(gpu):
            gpu = _partitioned(handle, gpu, versions.driver, memory, gpu_faults)
        if gpu.mig_enabled:
            gpu = _with_mig_devices(handle, gpu, versions.driver, memory, foreign_instances, gpu_faults)
        return handle, gpu, gpu_faults

    answers = memory.walk.each(range(count), read)
    silent: list[Gpu] = []
    for index in range(count):
        try:
            if index not in answers:
                raise RetryableError(NOT_ANSWERED)
            handle, gpu, gpu_faults = answers[index].result()
        except (NvmlUnavailableError, StateError):
            raise
        except DraDriverError as error:
            known = memory.known.get(memory.uuids.get(index, ""))
            if known is None or isinstance(error, DeviceLostError):
                faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
                continue
            faults.append(
                DiscoveryFault(f"GPU {known.uuid}", f"the plugin shows its last known state: {error}")
            )
            if known.partitioning is not None:
                unread.add(known.uuid)
            silent.append(known)
            continue
        if gpu.architecture in NOT_GPUS:
            continue
        found[index] = (handle, gpu)
        faults += gpu_faults
        memory.known[gpu.uuid], memory.uuids[index] = gpu, gpu.uuid
    gpus = sorted([*(gpu for _, gpu in found.values()), *silent], key=_place)
    pairs, pair_faults = read_reachable_pairs(found, memory.peers, silent, memory.walk)
    faults += pair_faults
    return Inventory(
        versions,
        tuple(gpus),
        faults=tuple(faults),
        unread=frozenset(unread),
        hanging=sum(memory.uuids.get(at) not in memory.known for at in range(count) if at not in answers),
        reachable_pairs=pairs,
        confidential_compute=confidential,
    )


def _place(gpu: Gpu) -> tuple[str, str]:
    return (gpu.pci_bus_id or "", gpu.uuid)


def _with_known(gpu: Gpu, log: FaultLog, known: Gpu | None, unread: set[str]) -> Gpu:
    """Return the GPU with the earlier value for each failed query: a failure does not mean that the value changed.

    Raises: RetryableError if the architecture of a new device or the PCI bus ID of a known GPU could not be read.
    """
    if known is None:
        if "architecture" in log.failed:
            unread.add(gpu.uuid)
            cause = log.failed["architecture"]
            raise RetryableError(f"it is not published, because it may not be a GPU: {cause}")
        return gpu
    if gpu.pci_bus_id is None:
        raise RetryableError(f"NVML cannot read it: {log.faults[0].text}")
    kept = [name for name, reading in READINGS.items() if log.failed.keys() & reading.what]
    return replace(gpu, **{name: getattr(known, name) for name in kept})


def _partitioned(
    handle: Handle, gpu: Gpu, driver_version: str | None, memory: ScanMemory, faults: list[DiscoveryFault]
) -> Gpu:
    partitioning, partition_faults = memory.partitions.read(handle, gpu, driver_version)
    faults += partition_faults
    gpu = replace(gpu, partitioning=partitioning)
    return memory.peers.recalled(handle, gpu) if gpu.can_be_whole else gpu


def _with_mig_devices(
    handle: Handle,
    gpu: Gpu,
    driver_version: str | None,
    memory: ScanMemory,
    foreign_instances: ForeignInstances | None,
    faults: list[DiscoveryFault],
) -> Gpu:
    if gpu.partitioning is None or gpu.uuid in memory.partitions.unread:
        profiles = memory.profiles.of(handle, gpu, driver_version, faults)
        devices, mig_faults = read_mig_devices(handle, gpu, profiles)
    else:
        existing: Sequence[GpuInstance] = gpu.partitioning.withheld
        if foreign_instances is not None:
            existing = foreign_instances(gpu.uuid, existing)
        theirs = {instance.gpu_instance_id for instance in existing}
        if not theirs:
            return gpu
        profiles = {row.profile.profile_id: row.profile for row in gpu.partitioning.profiles}
        devices, mig_faults = read_mig_devices(handle, gpu, profiles, theirs)
    faults += mig_faults
    return replace(gpu, mig_devices=devices)


_CURRENT: Mapping[str, Reading] = {name: one for name, one in READINGS.items() if one.kept_current}
_HANGS = GpuFingerprint("")


def read_nvml_fingerprint(memory: ScanMemory) -> NvmlFingerprint:
    """Return a value that changes when a GPU appears, is lost or changes its MIG mode, within microseconds.

    A lost GPU is None. A GPU that does not answer keeps its last entry, so that NVML is not reopened because of a hang.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    answers = memory.walk.each(range(count), lambda index: _fingerprint_of(index, memory))
    known = memory.fingerprints
    for index, answer in answers.items():
        try:
            known[index] = answer.result()
        except NvmlUnavailableError:
            raise
        except DraDriverError:
            known.setdefault(index, None)
    return tuple(known.get(index, _HANGS) for index in range(count))


def _fingerprint_of(index: int, memory: ScanMemory) -> GpuFingerprint | None:
    """Use the handle: after a drain another card may have this index, but the handle is still that of the card that is
    gone.
    """
    try:
        if index not in memory.handles:
            with nvml_errors(f"find GPU with NVML index {index}"):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                memory.handles[index] = handle, pynvml.nvmlDeviceGetUUID(handle)
        handle, uuid = memory.handles[index]
        return GpuFingerprint(uuid, read_values(handle, _CURRENT, lambda _, *call: supported(*call)))
    except DeviceLostError:
        return None


def _confidential_mode(log: FaultLog) -> ConfidentialMode | None:
    """Return None also if NVML reports a lost GPU: it does not say which one, and the others can be read."""
    try:
        mode: ConfidentialMode | None = log.read("confidential computing", confidential_mode)
        return mode
    except DeviceLostError as error:
        log.faults.append(DiscoveryFault(log.subject, f"confidential computing: {error}"))
        return None


def _read_versions(log: FaultLog) -> DriverVersions:
    driver = log.read("driver version", pynvml.nvmlSystemGetDriverVersion)
    cuda = log.read("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion)
    return DriverVersions(driver, None if cuda is None else (cuda // 1000, cuda % 1000 // 10))
