"""Usage of the devices of claims, and GPU processes that belong to no claim and no container.

| Process | Unclaimed | Why |
|---|---|---|
| in a container, by its cgroup | no | its owner can be found |
| of MPS, of the NVIDIA driver, or for monitoring, by its name | no | it is expected |
| in a service or login session of the host | yes | pods cannot use its memory |
| exited, or of unknown origin, on a device of a claim | no | it may be the claim's |
| exited, or of unknown origin, elsewhere | yes | no claim has its memory |
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dra_driver.model.claim import ClaimRef, HeldDevice, PodRef
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.gpu import GpuLoad, GpuProcess, GpuUse, ProcessOrigin
from dra_driver.model.inventory import DynamicMigDevice, Inventory, StaticMigDevice
from dra_driver.model.mig import MigAddress, OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.remedies import reset

Origins = Mapping[int, ProcessOrigin]

_BELONGS_THERE = frozenset(
    {
        "nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-persistenced", "nv-fabricmanager", "nvidia-imex",
        "nv-hostengine", "dcgm-exporter", "dcgmi", "nvidia-smi", "nvtop",
    }
)  # fmt: skip
_MAX_WITHOUT = 16
"""Pods without a process must not flood the time series database."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device that claims hold. If several share it, NVML does not report the usage of each claim."""

    device: str
    kind: str
    uuid: str
    gpu_uuid: str
    is_shared: bool
    gpu_fraction: float | None = None
    load: GpuLoad | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class PodUse:
    """Usage by one pod on a device of its claims; `claim` is None if there are several.

    The utilisation is known for all pods on a device, or for none.
    """

    namespace: str
    pod: str
    claim: str | None
    device: str
    kind: str
    uuid: str
    gpu_uuid: str
    processes: int
    memory_bytes: int | None
    utilisation_percent: int | None


class GpuLabels(NamedTuple):
    """NVML's index of a GPU, and the claim and pod that have the whole GPU; empty if unknown or ambiguous."""

    gpu: str = ""
    namespace: str = ""
    claim: str = ""
    pod: str = ""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One reading of the GPUs that answered in time; mappings are by UUID."""

    devices: Sequence[DeviceUse] = ()
    pods: Sequence[PodUse] = ()
    gpus: Mapping[str, GpuUse] = field(default_factory=dict)
    labels: Mapping[str, GpuLabels] = field(default_factory=dict)
    unclaimed: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)


Made = Callable[[str], OwnedInstance | None]
"""Return the current instance of an on-demand MIG device, by name."""


def held_devices(records: Iterable[ClaimRecord]) -> dict[str, HeldDevice]:
    """Return the devices of claims, by name. Omits adminAccess: such claims only observe the GPU."""
    return {one.device: one for _, one in _held(records)}


def _held(records: Iterable[ClaimRecord]) -> Iterator[tuple[ClaimRecord, HeldDevice]]:
    for record in records:
        yield from ((record, one) for one in record.devices if not one.admin_access)


def mig_addresses(held: Mapping[str, HeldDevice], inventory: Inventory, made: Made) -> dict[str, MigAddress]:
    found = {name: mig_address(one, inventory, made) for name, one in held.items()}
    return {name: mig for name, mig in found.items() if mig is not None}


def mig_address(held: HeldDevice, inventory: Inventory, made: Made) -> MigAddress | None:
    if held.kind != "mig":
        return None
    device = inventory.by_name.get(held.device) or inventory.withheld_by_name.get(held.device)
    if isinstance(device, StaticMigDevice):
        return MigAddress(device.uuid, device.mig.gpu_instance_id, device.mig.compute_instance_id)
    owned = made(held.device)
    if owned is None or None in (owned.uuid, owned.gpu_instance_id, owned.compute_instance_id):
        return None
    return MigAddress(owned.uuid or "", owned.gpu_instance_id or 0, owned.compute_instance_id or 0)


def mig_profile(held: HeldDevice, inventory: Inventory) -> str | None:
    device = _mig_device(held, inventory)
    return None if device is None else device.profile.name


def _mig_device(held: HeldDevice, inventory: Inventory) -> StaticMigDevice | DynamicMigDevice | None:
    device = inventory.usable(held.device) or inventory.withheld_by_name.get(held.device)
    return device if isinstance(device, (StaticMigDevice, DynamicMigDevice)) else None


def device_uses(
    records: Iterable[ClaimRecord],
    inventory: Inventory,
    addresses: Mapping[str, MigAddress],
    gpus: Mapping[str, GpuUse],
) -> list[DeviceUse]:
    """Return usage by device. `addresses` is by device name, `gpus` by GPU UUID."""
    prepared = [record for record in records if record.phase == "prepared"]
    claims: dict[str, set[str]] = {}
    for record, held in _held(prepared):
        claims.setdefault(held.device, set()).add(record.ref.uid)
    return [
        _use(held, len(claims[name]) > 1, inventory, addresses.get(name), gpus.get(held.gpu_uuid))
        for name, held in held_devices(prepared).items()
    ]


def _use(
    held: HeldDevice, is_shared: bool, inventory: Inventory, mig: MigAddress | None, seen: GpuUse | None
) -> DeviceUse:
    uuid = mig.uuid if mig is not None else held.uuid
    load: GpuLoad | None = None
    if seen is not None:
        load = seen.load if held.kind == "gpu" else seen.mig.get(uuid)
    listed = None if load is None else _processes_on(held, mig, seen)
    processes = None if listed is None else sum(not one.is_mps_server for one in listed)
    fraction = gpu_fraction(held, inventory)
    return DeviceUse(held.device, held.kind, uuid, held.gpu_uuid, is_shared, fraction, load, processes)


def gpu_labels(records: Iterable[ClaimRecord], inventory: Inventory) -> dict[str, GpuLabels]:
    holders: dict[str, set[GpuLabels]] = {}
    for record, held in _held(record for record in records if record.phase == "prepared"):
        if held.kind == "gpu":
            pods = record.claim.pods or ()
            pod = pods[0].name if len(pods) == 1 else ""
            holder = GpuLabels("", record.ref.namespace, record.ref.name, pod)
            holders.setdefault(held.gpu_uuid, set()).add(holder)
    found = {}
    for gpu in inventory.gpus:
        of_gpu = holders.get(gpu.uuid, set())
        holder = next(iter(of_gpu)) if len(of_gpu) == 1 else GpuLabels()
        found[gpu.uuid] = holder._replace(gpu="" if gpu.index is None else str(gpu.index))
    return found


def pod_uses(
    records: Iterable[ClaimRecord],
    addresses: Mapping[str, MigAddress],
    gpus: Mapping[str, GpuUse],
    origins: Origins,
) -> list[PodUse]:
    """Return usage by pod, except on devices with unknown processes. `addresses` is by device name, `gpus` by GPU
    UUID.
    """
    prepared = [record for record in records if record.phase == "prepared" and record.claim.pods]
    holders: dict[str, dict[PodRef, set[ClaimRef]]] = {}
    for record, held in _held(prepared):
        for pod in record.claim.pods or ():
            holders.setdefault(held.device, {}).setdefault(pod, set()).add(record.ref)
    return [
        use
        for name, held in held_devices(prepared).items()
        for use in _pods_on(held, holders[name], addresses.get(name), gpus.get(held.gpu_uuid), origins)
    ]


def _pods_on(
    held: HeldDevice,
    holders: Mapping[PodRef, set[ClaimRef]],
    mig: MigAddress | None,
    seen: GpuUse | None,
    origins: Origins,
) -> Iterator[PodUse]:
    listed = _processes_on(held, mig, seen)
    if seen is None or listed is None:
        return
    by_pod: dict[str | None, list[GpuProcess]] = {}
    for process in listed:
        by_pod.setdefault(origins[process.pid].pod_uid, []).append(process)
    # A process of an unknown pod may belong to one of these claims, for example if its pod was replaced.
    uids = {pod.uid for pod in holders}
    foreign = [
        process for process in listed if not (_belongs(process) or origins[process.pid].where == "host")
    ]
    foreign = [process for process in foreign if origins[process.pid].pod_uid not in uids]
    # If NVML has no samples of one process, or does not list it, the sum of the others is incomplete.
    is_measured = held.kind == "gpu" and all(process.utilisation_percent is not None for process in listed)
    is_measured &= not any(process.utilisation_percent for process in foreign)
    is_measured &= bool(listed) or seen.load.utilisation_percent == 0
    without = 0
    for pod, (first, *others) in holders.items():
        processes = by_pod.get(pod.uid, [])
        without += not processes
        if processes or (without <= _MAX_WITHOUT and not foreign):
            percent = sum(process.utilisation_percent or 0 for process in processes)
            memory = [process.memory_bytes for process in processes]
            yield PodUse(
                namespace=first.namespace,
                pod=pod.name,
                claim=None if others else first.name,
                device=held.device,
                kind=held.kind,
                uuid=held.uuid if mig is None else mig.uuid,
                gpu_uuid=held.gpu_uuid,
                processes=len(processes),
                memory_bytes=None if None in memory else sum(filter(None, memory)),
                utilisation_percent=min(100, percent) if is_measured else None,
            )


def _processes_on(
    held: HeldDevice, mig: MigAddress | None, seen: GpuUse | None
) -> Sequence[GpuProcess] | None:
    """MIG devices of one GPU instance get the same processes."""
    if seen is None or seen.processes is None or (held.kind == "mig" and mig is None):
        return None
    place = None if mig is None else mig.gpu_instance_id
    return [process for process in seen.processes if place in (None, process.gpu_instance_id)]


def gpu_fraction(held: HeldDevice, inventory: Inventory) -> float | None:
    if held.kind != "mig":
        return 1.0
    device = _mig_device(held, inventory)
    if device is not None and device.gpu.memory_bytes:
        return device.profile.memory_mib * _MIB / device.gpu.memory_bytes
    return None


def _belongs(process: GpuProcess) -> bool:
    return process.program in _BELONGS_THERE


Place = tuple[str, int | None]
"""The GPU's UUID, and the GPU instance ID for a MIG device."""


def unclaimed(
    gpu_uuid: str,
    processes: Iterable[GpuProcess],
    claimed: Container[Place],
    origins: Origins,
) -> list[GpuProcess]:
    def belongs(process: GpuProcess) -> bool:
        if _belongs(process):
            return True
        where, instance = origins[process.pid].where, process.gpu_instance_id
        # Outside of MIG mode, NVML may report instance 0 for the whole GPU.
        is_claimed = (gpu_uuid, instance) in claimed or (instance == 0 and (gpu_uuid, None) in claimed)
        return where == "container" or (where == "unknown" and is_claimed)

    return [process for process in processes if not belongs(process)]


def unclaimed_text(gpu: str, process: GpuProcess) -> str:
    name = f" ({process.name})" if process.name else ""
    memory = "memory" if process.memory_bytes is None else f"{process.memory_bytes // _MIB} MiB"
    return (
        f"process {process.pid}{name} uses {memory} on {gpu} but does not belong to a prepared claim or a container; "
        f"find it with `ps -fp {process.pid}` on the node and stop it, or run it in a pod with a claim; if this "
        f"process does not exist, {reset()}"
    )
