"""Usage of the devices of claims, and GPU processes that belong to no claim and no container.

| Process | Unclaimed | Why |
|---|---|---|
| in a pod or another container, by its cgroup | no | its owner can be found |
| of MPS, of the NVIDIA driver, or a monitoring program, by its name | no | it is expected on the node |
| in a service or login session of the host | yes | pods cannot use its memory, and no claim accounts for it |
| exited, or of unknown origin, on a device of a claim | no | it may be the claim's |
| exited, or of unknown origin, elsewhere | yes | no claim accounts for its memory |
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from dra_driver.model.claim import ClaimRef, PodRef
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.gpu import GpuLoad, GpuProcess, GpuUse, ProcessOrigin
from dra_driver.model.inventory import DynamicMigDevice, Inventory, StaticMigDevice
from dra_driver.model.mig import MigAddress, OwnedInstance
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.remedies import reset

Origins = Mapping[int, ProcessOrigin]
"""Where each process that NVML lists runs, by process ID."""

_BELONGS_THERE = frozenset(
    {
        "nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-persistenced", "nv-fabricmanager", "nvidia-imex",
        "nv-hostengine", "dcgm-exporter", "dcgmi", "nvidia-smi", "nvtop",
    }
)  # fmt: skip
_MAX_WITHOUT = 16
"""The maximum number of pods without a process that are reported for one device: a claim shared by hundreds of pods
must not flood the time series database."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device that claims hold. If several claims share it (`is_shared`), NVML does not report the usage of
    each claim.

    `gpu_fraction` is the device's fraction of the GPU's memory; `load` and `processes` are None if NVML does
    not report them.
    """

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
    """Usage by the processes of one pod on a device of its claims.

    `claim` is None if the pod holds the device through several claims. `memory_bytes` and
    `utilisation_percent` are None if NVML does not report them for each process. The utilisation is known for
    all pods on a device, or for none.
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


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One reading of all GPUs: the devices of claims, and the pods on them. `gpus` has the reading of each GPU, and
    `unclaimed` its unclaimed processes, by GPU UUID.

    GPUs that did not answer in time are not included.
    """

    devices: Sequence[DeviceUse] = ()
    pods: Sequence[PodUse] = ()
    gpus: Mapping[str, GpuUse] = field(default_factory=dict)
    unclaimed: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)


Made = Callable[[str], OwnedInstance | None]
"""Return the current instance of an on-demand MIG device, by the device's name."""


def held_devices(records: Iterable[ClaimRecord]) -> dict[str, HeldDevice]:
    """Return the devices that claims hold, by name. Omits devices with adminAccess, whose claims only observe
    the GPU.
    """
    return {one.device: one for _, one in _held(records)}


def _held(records: Iterable[ClaimRecord]) -> Iterator[tuple[ClaimRecord, HeldDevice]]:
    for record in records:
        yield from ((record, one) for one in record.devices if not one.admin_access)


def mig_addresses(held: Mapping[str, HeldDevice], inventory: Inventory, made: Made) -> dict[str, MigAddress]:
    """Return NVML's addresses of the MIG devices, by device name."""
    found = {name: mig_address(one, inventory, made) for name, one in held.items()}
    return {name: mig for name, mig in found.items() if mig is not None}


def mig_address(held: HeldDevice, inventory: Inventory, made: Made) -> MigAddress | None:
    """Return NVML's address of a MIG device that a claim holds; None for a whole GPU, or if the device does not
    exist.
    """
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
    """Return the name of a MIG device's profile, if discovery found the device."""
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
    """Return the usage of each device that prepared claims hold without adminAccess. `addresses` has the
    addresses of MIG devices, by device name.
    """
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
    fraction = _fraction(held, inventory)
    return DeviceUse(held.device, held.kind, uuid, held.gpu_uuid, is_shared, fraction, load, processes)


def pod_uses(
    records: Iterable[ClaimRecord],
    addresses: Mapping[str, MigAddress],
    gpus: Mapping[str, GpuUse],
    origins: Origins,
) -> list[PodUse]:
    """Return the usage of each pod on each device of its prepared claims.

    `addresses` has the addresses of MIG devices by device name, and `gpus` the readings by GPU UUID. Devices with
    unknown processes are omitted.
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
    """Return the processes on a device; None if unknown. MIG devices of one GPU instance get the same processes."""
    if seen is None or seen.processes is None or (held.kind == "mig" and mig is None):
        return None
    place = None if mig is None else mig.gpu_instance_id
    return [process for process in seen.processes if place in (None, process.gpu_instance_id)]


def _fraction(held: HeldDevice, inventory: Inventory) -> float | None:
    if held.kind != "mig":
        return 1.0
    device = _mig_device(held, inventory)
    if device is not None and device.gpu.memory_bytes:
        return device.profile.memory_mib * _MIB / device.gpu.memory_bytes
    return None


def _belongs(process: GpuProcess) -> bool:
    return process.program in _BELONGS_THERE


Place = tuple[str, int | None]
"""Where a claim's processes may be: the GPU's UUID, and the GPU instance ID for a MIG device."""


def unclaimed(
    gpu_uuid: str,
    processes: Iterable[GpuProcess],
    claimed: Container[Place],
    origins: Origins,
) -> list[GpuProcess]:
    """Return the processes on a GPU that belong to no claim and no container."""

    def belongs(process: GpuProcess) -> bool:
        if _belongs(process):
            return True
        where, instance = origins[process.pid].where, process.gpu_instance_id
        # Outside of MIG mode, NVML may report instance 0 for the whole GPU.
        is_claimed = (gpu_uuid, instance) in claimed or (instance == 0 and (gpu_uuid, None) in claimed)
        return where == "container" or (where == "unknown" and is_claimed)

    return [process for process in processes if not belongs(process)]


def unclaimed_text(gpu: str, process: GpuProcess) -> str:
    """Return the problem and the remedy; `gpu` is the GPU's name in the text."""
    name = f" ({process.name})" if process.name else ""
    memory = "memory" if process.memory_bytes is None else f"{process.memory_bytes // _MIB} MiB"
    return (
        f"process {process.pid}{name} uses {memory} on {gpu} but does not belong to a prepared claim or a container; "
        f"find it with `ps -fp {process.pid}` on the node and stop it, or run it in a pod with a claim; if this "
        f"process does not exist, {reset()}"
    )
