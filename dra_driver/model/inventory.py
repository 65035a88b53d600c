"""A snapshot of the node's devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal

from dra_driver.model.dataclass import dataclass, field, replace
from dra_driver.model.gpu import Card, Gpu, uuid_of_bus_id
from dra_driver.model.ids import (
    gpu_device_names,
    gpu_minor_names,
    mig_device_name,
    mig_slot_name,
    vfio_device_name,
)
from dra_driver.model.mig import MigDevice, MigProfile, Placement

ConfidentialMode = Literal["off", "on", "devtools", "ppcie"]
"""`devtools` allows debugging, `ppcie` protects the links between several GPUs."""


@dataclass(frozen=True, slots=True)
class DriverVersions:
    """As in NVML: driver `570.124.06`, CUDA (12, 8)."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DiscoveryFault:
    """What discovery could not find or read; `subject` says where."""

    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class WholeGpu:
    name: str
    gpu: Gpu

    @property
    def uuid(self) -> str:
        return self.gpu.uuid


@dataclass(frozen=True, slots=True)
class StaticMigDevice:
    name: str
    gpu: Gpu
    mig: MigDevice

    @property
    def uuid(self) -> str:
        return self.mig.uuid

    @property
    def profile(self) -> MigProfile:
        return self.mig.profile

    @property
    def placement(self) -> Placement:
        return self.mig.placement


@dataclass(frozen=True, slots=True)
class DynamicMigDevice:
    """A MIG device that the plugin creates when a claim needs it."""

    name: str
    gpu: Gpu
    profile: MigProfile
    placement: Placement

    @property
    def uuid(self) -> str:
        """Each creation gives the device a new UUID, which is in the ledger."""
        return ""


@dataclass(frozen=True, slots=True)
class VfioDevice:
    """While the card is bound to vfio, only the bus ID of `gpu` is known."""

    name: str
    gpu: Gpu
    card: Card

    @property
    def uuid(self) -> str:
        """Does not depend on whether NVML lists the GPU."""
        return uuid_of_bus_id(self.card.bus_id)


OfferedDevice = WholeGpu | StaticMigDevice | DynamicMigDevice | VfioDevice


@dataclass(frozen=True)
class Inventory:
    """All GPUs in PCI order. `nvlink_domains` maps GPU UUIDs to domains.

    `lost` GPUs are as they were before they stopped responding. They stay published, with a taint, because a
    claim may hold them. `unread` are UUIDs of GPUs for MIG on demand whose profiles or instances were not
    read completely (`partitioning` is outdated or None), and of devices whose architecture was never read, so
    that they may not be GPUs. `hanging` counts GPUs that were never read because an NVML call does not
    return. `reachable_pairs` are pairs of UUIDs with the number of NVLinks between them.

    `imex_channels` is None if the NVIDIA driver has none or the configuration uses none. With `kept_names`,
    GPUs are named by minor number, and these names, by UUID, stay when the number changes. No slots, because
    it caches values.
    """

    versions: DriverVersions = DriverVersions()
    gpus: tuple[Gpu, ...] = ()
    nvlink_domains: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[DiscoveryFault, ...] = ()
    lost: tuple[Gpu, ...] = ()
    unread: frozenset[str] = field(default=frozenset(), compare=False)
    hanging: int = field(default=0, compare=False)
    reachable_pairs: Mapping[frozenset[str], int] = field(default_factory=dict, compare=False)
    imex_channels: int | None = None
    confidential_compute: ConfidentialMode | None = None
    kept_names: Mapping[str, str] | None = field(default=None, compare=False)
    cards: tuple[Card, ...] = ()

    @cached_property
    def every_gpu(self) -> tuple[Gpu, ...]:
        return tuple(sorted((*self.gpus, *self.lost), key=_pci_order))

    @cached_property
    def under_vfio(self) -> Mapping[str, Card]:
        """Cards that are bound to vfio, by GPU UUID."""
        return {card.gpu_uuid: card for card in self.cards if card.is_bound and card.problem is None}

    @cached_property
    def offered_gpus(self) -> tuple[Gpu, ...]:
        """Includes the GPUs under vfio."""
        bound = {card.bus_id: Gpu(uuid, pci_bus_id=card.bus_id) for uuid, card in self.under_vfio.items()}
        others = (
            gpu for gpu in self.every_gpu if gpu.pci_bus_id not in bound and gpu.uuid not in self.under_vfio
        )
        return tuple(sorted((*bound.values(), *others), key=_pci_order))

    @cached_property
    def cards_by_gpu(self) -> Mapping[str, Card]:
        """Without GPUs that cannot be used whole: a claim never destroys static MIG devices."""
        return {gpu.uuid: card for gpu, card in self._cards() if _is_whole(gpu)}

    @cached_property
    def lost_uuids(self) -> frozenset[str]:
        return frozenset(gpu.uuid for gpu in self.lost)

    @cached_property
    def gpu_names(self) -> Mapping[str, str]:
        """Also of GPUs under vfio, so that names do not change while GPUs are bound."""
        minors = {gpu.uuid: gpu.minor for gpu in (*self.offered_gpus, *self.every_gpu)}
        if self.kept_names is None:
            return gpu_device_names(minors)
        return gpu_minor_names(minors, self.kept_names)

    @cached_property
    def by_name(self) -> Mapping[str, OfferedDevice]:
        return {device.name: device for device in self._offered()}

    @cached_property
    def withheld_by_name(self) -> Mapping[str, StaticMigDevice]:
        """MIG devices on partitioned GPUs that this plugin does not manage."""
        return {
            (name := mig_device_name(self.gpu_names[gpu.uuid], mig)): StaticMigDevice(name, gpu, mig)
            for gpu in self.every_gpu
            if gpu.partitioning is not None
            for mig in gpu.mig_devices
        }

    @cached_property
    def returning_by_name(self) -> Mapping[str, OfferedDevice]:
        """Unpublished only until the plugin destroys its own instances, or returns the GPU to the NVIDIA
        driver.
        """
        return {device.name: device for device in self._returning()}

    def usable(self, name: str) -> OfferedDevice | None:
        """Return the device if it is published, or becomes available as soon as a claim needs it."""
        return self.by_name.get(name) or self.returning_by_name.get(name)

    def without_partitions(self) -> Inventory:
        """Return the inventory for an API server without partitionable devices, and so without GPUs for
        virtual machines.
        """
        gpus = tuple(_unpartitioned(gpu) for gpu in self.gpus)
        lost = tuple(_unpartitioned(gpu) for gpu in self.lost)
        return replace(self, gpus=gpus, lost=lost, cards=())

    def devices(self) -> Iterable[OfferedDevice]:
        return self.by_name.values()

    def _cards(self) -> Iterator[tuple[Gpu, Card]]:
        cards = {card.bus_id: card for card in self.cards if card.problem is None}
        for gpu in self.offered_gpus:
            if gpu.pci_bus_id in cards:
                yield gpu, cards[gpu.pci_bus_id]

    def _returning(self) -> Iterator[OfferedDevice]:
        for gpu in self.offered_gpus:
            if gpu.partitioning is not None:
                parts, whole = gpu.partitioning.returning, gpu.partitioning.whole_returns
                yield from _partitions(self.gpu_names[gpu.uuid], gpu, parts, has_whole=whole)
        for gpu, card in self._cards():
            if gpu.uuid in self.under_vfio and card.by_us:
                yield WholeGpu(self.gpu_names[gpu.uuid], gpu)
            if gpu.partitioning is not None and gpu.partitioning.whole_returns:
                yield _for_virtual_machine(gpu, card)

    def _offered(self) -> Iterator[OfferedDevice]:
        for gpu in self.offered_gpus:
            if gpu.uuid not in self.under_vfio:
                yield from _for_containers(self.gpu_names[gpu.uuid], gpu)
            card = self.cards_by_gpu.get(gpu.uuid)
            if card is not None:
                yield _for_virtual_machine(gpu, card)


def _pci_order(gpu: Gpu) -> tuple[str, str]:
    return (gpu.pci_bus_id or "", gpu.uuid)


def _is_whole(gpu: Gpu) -> bool:
    return not gpu.mig_enabled if gpu.partitioning is None else gpu.partitioning.offers_whole


def _for_containers(name: str, gpu: Gpu) -> Iterator[OfferedDevice]:
    if gpu.partitioning is not None:
        parts, whole = gpu.partitioning.possible, gpu.partitioning.offers_whole
        yield from _partitions(name, gpu, parts, has_whole=whole)
    elif not gpu.mig_enabled:
        yield WholeGpu(name, gpu)
    else:
        for mig in sorted(gpu.mig_devices, key=_mig_order):
            yield StaticMigDevice(mig_device_name(name, mig), gpu, mig)


def _for_virtual_machine(gpu: Gpu, card: Card) -> VfioDevice:
    return VfioDevice(vfio_device_name(card.bus_id), gpu, card)


def _partitions(
    name: str, gpu: Gpu, parts: Iterable[tuple[MigProfile, Placement]], *, has_whole: bool
) -> Iterator[OfferedDevice]:
    if has_whole:
        yield WholeGpu(name, gpu)
    for profile, placement in parts:
        yield DynamicMigDevice(mig_slot_name(name, profile, placement), gpu, profile, placement)


def _unpartitioned(gpu: Gpu) -> Gpu:
    if gpu.partitioning is None:
        return gpu
    return replace(gpu, partitioning=replace(gpu.partitioning, possible=(), returning=()))


def _mig_order(mig: MigDevice) -> tuple[int, int, int]:
    return (mig.placement.start, mig.profile.profile_id, mig.compute_instance_id)
