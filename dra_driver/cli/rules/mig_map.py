"""A GPU's memory slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dra_driver.cli.rules.node_state import NodeState
from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import mig_device_name, mig_slot_name
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import (
    GpuInstance,
    MigDevice,
    MigProfile,
    OwnedInstance,
    Partitioning,
    Placement,
)
from dra_driver.model.record import ClaimRecord
from dra_driver.model.remedies import reset
from dra_driver.model.steps import CreateMig


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """`gpu_instance_id` is None if the instance does not exist but a claim holds it."""

    profile: str
    place: Placement
    holder: str
    gpu_instance_id: int | None = None
    compute_instance_ids: tuple[int, ...] = ()

    @property
    def slices(self) -> str:
        start, size = self.place.start, self.place.size
        return f"slice {start}" if size == 1 else f"slices {start}-{start + size - 1}"

    @property
    def ids(self) -> str:
        if self.gpu_instance_id is None:
            return "absent"
        compute = ",".join(str(number) for number in sorted(self.compute_instance_ids))
        return f"GI {self.gpu_instance_id}" + (f" CI {compute}" if compute else "")


@dataclass(frozen=True, slots=True)
class GpuMap:
    """The content of a GPU's drawing.

    `room` is how many instances of each profile still fit, one profile at a time. `called` are all names that users
    can give.
    """

    name: str
    product: str | None
    mode: str
    memory_slices: int
    instances: tuple[SeenInstance, ...] = ()
    room: tuple[tuple[str, int], ...] = ()
    whole_owner: str | None = None
    called: frozenset[str] = frozenset()


_OURS = {
    "creating": "being created by gpu-dra-driver",
    "unknown": "being created by gpu-dra-driver",
    "created": "created by gpu-dra-driver, not used by a claim",
}


def gpu_maps(inventory: Inventory, known: NodeState, on_demand: Callable[[Gpu], bool]) -> list[GpuMap]:
    """Return a drawing's content for each GPU in MIG mode or with MIG on demand.

    `withheld` has all GPU instances, no matter who created them.
    """
    return [
        _map_of(inventory.gpu_names[gpu.uuid], gpu, gpu.partitioning, known, on_demand(gpu))
        for gpu in inventory.gpus
        if gpu.partitioning is not None and (gpu.mig_enabled or on_demand(gpu))
    ]


def waiting_for_mig_mode(inventory: Inventory, on_demand: Callable[[Gpu], bool]) -> Iterator[str]:
    for gpu in inventory.gpus:
        if on_demand(gpu) and gpu.mig_capable and gpu.partitioning is None and not gpu.mig_enabled:
            yield (
                f"GPU {gpu.uuid}: MIG devices cannot be created on demand, because MIG mode is off, and switching it "
                f"on needs a reset: run `nvidia-smi -i {gpu.uuid} -mig 1` on the node, then {reset(gpu.uuid)}"
            )


def remaining_room(table: Partitioning, taken: Sequence[GpuInstance]) -> tuple[tuple[str, int], ...]:
    possible = partitioned(table, taken, offers_whole=False).possible
    profiles = {profile.profile_id: profile for profile, _ in possible}
    return tuple((profile.name, _how_many(table, taken, profile)) for profile in profiles.values())


def _how_many(table: Partitioning, taken: Sequence[GpuInstance], profile: MigProfile) -> int:
    """Count instances placed by earliest end, which is optimal because placements are intervals."""
    chosen: list[GpuInstance] = []
    while True:
        left = partitioned(table, [*taken, *chosen], offers_whole=False).possible
        ends = [(place.start + place.size, place) for other, place in left if other == profile]
        if not ends:
            return len(chosen)
        chosen.append(GpuInstance(-1, profile.profile_id, min(ends)[1]))


def _map_of(name: str, gpu: Gpu, table: Partitioning, known: NodeState, on_demand: bool) -> GpuMap:
    profiles = {placed.profile.profile_id: placed.profile for placed in table.profiles}
    holders = _holders(gpu, known.records, "mig")
    there = [
        _existing(name, gpu, instance, profiles.get(instance.profile_id), holders, known, on_demand)
        for instance in table.withheld
    ]
    missing = _missing(gpu, table.withheld, known.records)
    absent = [
        SeenInstance(step.profile_name, step.placement, ", ".join(holders.get(step.device, ())))
        for step in missing
    ]
    instances = sorted(
        (*there, *absent), key=lambda one: (one.place.start, one.place.size, one.gpu_instance_id or 0)
    )
    places = (place for row in table.profiles for place in row.placements)
    taken = [*table.withheld, *(GpuInstance(-1, step.profile_id, step.placement) for step in missing)]
    of_whole = _holders(gpu, known.records, "gpu").values()
    whole = ", ".join(sorted({claim for claims in of_whole for claim in claims})) or None
    return GpuMap(
        name=name,
        product=gpu.product_name,
        mode=("on" if gpu.mig_enabled else "off") + (", MIG devices on demand" if on_demand else ""),
        memory_slices=max((place.start + place.size for place in places), default=0),
        instances=tuple(instances),
        room=() if whole else remaining_room(table, taken),
        whole_owner=whole,
        called=frozenset(map(str, (name, gpu.uuid, gpu.index, gpu.pci_bus_id))),
    )


def _existing(
    name: str,
    gpu: Gpu,
    instance: GpuInstance,
    profile: MigProfile | None,
    holders: Mapping[str, Sequence[str]],
    known: NodeState,
    on_demand: bool,
) -> SeenInstance:
    devices = [mig for mig in gpu.mig_devices if mig.gpu_instance_id == instance.gpu_instance_id]
    called = {mig_device_name(name, mig) for mig in devices}
    if profile is not None:
        called.add(mig_slot_name(name, profile, instance.placement))
    claims = [holder for device in sorted(called) for holder in holders.get(device, ())]
    return SeenInstance(
        f"profile {instance.profile_id}" if profile is None else profile.name,
        instance.placement,
        ", ".join(claims) or _without_claim(gpu, instance, devices, known, on_demand),
        instance.gpu_instance_id,
        tuple(sorted(mig.compute_instance_id for mig in devices)),
    )


def _without_claim(
    gpu: Gpu, instance: GpuInstance, devices: Sequence[MigDevice], known: NodeState, on_demand: bool
) -> str:
    if known.faults:
        return "unknown, because the records of gpu-dra-driver could not be read"
    for owned in known.owned:
        if owned.gpu_uuid == gpu.uuid and _is_same(owned, instance, devices, known.boot_id):
            if owned.slot in known.leaving(gpu.uuid):
                return "created by gpu-dra-driver, not used by a claim, will be destroyed"
            of_layout = owned.is_of_layout and owned.phase == "created"
            return "free, from the node's MIG layout" if of_layout else _OURS[owned.phase]
    if on_demand:
        return "not created by gpu-dra-driver"
    return "free" if devices else "not published"


def _is_same(
    owned: OwnedInstance, instance: GpuInstance, devices: Iterable[MigDevice], boot_id: str | None
) -> bool:
    """Whether the ledger's entry is this instance, and not a later one at the same placement."""
    return (
        owned.slot == instance.slot
        and boot_id in (None, owned.boot_id)
        and owned.gpu_instance_id in (None, instance.gpu_instance_id)
        and all(owned.uuid in (None, mig.uuid) for mig in devices)
    )


def _holders(gpu: Gpu, records: Iterable[ClaimRecord], kind: str) -> Mapping[str, list[str]]:
    holders: dict[str, set[str]] = {}
    for record in records:
        for held in record.devices:
            if (held.gpu_uuid, held.kind, held.admin_access) == (gpu.uuid, kind, False):
                holders.setdefault(held.device, set()).add(_claim(record))
    return {device: sorted(claims) for device, claims in holders.items()}


def _missing(
    gpu: Gpu, existing: Iterable[GpuInstance], records: Iterable[ClaimRecord]
) -> Sequence[CreateMig]:
    """Return steps whose GPU instance was not created yet, or lost in a reboot."""
    there = {(instance.profile_id, instance.placement) for instance in existing}
    wanted = {
        (step.profile_id, step.placement): step
        for record in records
        for step in record.steps
        if isinstance(step, CreateMig) and step.gpu_uuid == gpu.uuid
    }
    return [step for place, step in wanted.items() if place not in there]


def _claim(record: ClaimRecord) -> str:
    return f"claim {record.ref.namespace}/{record.ref.name}" + (
        " (preparing)" if record.phase == "preparing" else ""
    )
