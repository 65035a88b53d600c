"""A snapshot of the node: discovered devices, read failures, and GPUs that do not respond."""

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
"""The GPUs' confidential computing mode: `devtools` allows debugging, `ppcie` protects the links between several
GPUs."""


@dataclass(frozen=True, slots=True)
class DriverVersions:
    """Versions reported by NVML: driver `570.124.06`, CUDA as (12, 8); None if unknown."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DiscoveryFault:
    """Something that discovery did not find or could not read. `subject` names the GPU, PCI function or part of
    the node, `text` the cause.
    """

    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class WholeGpu:
    """A GPU that is published whole, with its device name."""

    name: str
    gpu: Gpu

    @property
    def uuid(self) -> str:
        """The UUID as in CUDA and nvidia-smi."""
        return self.gpu.uuid


@dataclass(frozen=True, slots=True)
class StaticMigDevice:
    """A MIG device that exists, with its device name."""

    name: str
    gpu: Gpu
    mig: MigDevice

    @property
    def uuid(self) -> str:
        """The UUID as in CUDA and nvidia-smi."""
        return self.mig.uuid

    @property
    def profile(self) -> MigProfile:
        """The profile of its GPU instance."""
        return self.mig.profile

    @property
    def placement(self) -> Placement:
        """The placement of its GPU instance."""
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
        """Empty: the device gets a new UUID each time it is created. The ledger has the current UUID."""
        return ""


@dataclass(frozen=True, slots=True)
class VfioDevice:
    """A GPU for a virtual machine, with its device name. While the card is bound to vfio, only the bus ID of
    `gpu` is known.
    """

    name: str
    gpu: Gpu
    card: Card

    @property
    def uuid(self) -> str:
        """A UUID that does not depend on whether NVML lists the GPU."""
        return uuid_of_bus_id(self.card.bus_id)


OfferedDevice = WholeGpu | StaticMigDevice | DynamicMigDevice | VfioDevice


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the node in PCI order. `nvlink_domains` maps GPU UUIDs to NVLink domains.

    `lost` are GPUs as they were before they stopped responding. They stay published, with a taint, because the
    node still has the device and a claim may hold it. `unread` are the UUIDs of GPUs for MIG on demand whose
    profiles or instances were not read completely this time (their `partitioning` is outdated or None), and of
    devices that may not be GPUs, because their architecture was never read. `hanging` is the number of GPUs that
    were never read because an NVML call for them does not return. `reachable_pairs` are pairs of UUIDs of GPUs that
    reach each other over NVLink, with the number of links; the domains are derived from them.
    `imex_channels` is the number of IMEX channels of the NVIDIA driver; None if it has none or the configuration
    uses none. `confidential_compute` is None if unknown. `kept_names` is set if GPUs are named by minor number:
    these names, by UUID, stay the same when the number changes. `cards` are the GPUs that virtual machines may
    get, empty if passthrough is off.

    The class has no slots because it caches derived values.
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
        """All GPUs including lost ones, in PCI order."""
        return tuple(sorted((*self.gpus, *self.lost), key=_pci_order))

    @cached_property
    def under_vfio(self) -> Mapping[str, Card]:
        """The published cards that are bound to vfio, by GPU UUID; containers cannot get these cards."""
        return {card.gpu_uuid: card for card in self.cards if card.is_bound and card.problem is None}

    @cached_property
    def offered_gpus(self) -> tuple[Gpu, ...]:
        """Like `every_gpu`, including the GPUs under vfio."""
        bound = {card.bus_id: Gpu(uuid, pci_bus_id=card.bus_id) for uuid, card in self.under_vfio.items()}
        others = (
            gpu for gpu in self.every_gpu if gpu.pci_bus_id not in bound and gpu.uuid not in self.under_vfio
        )
        return tuple(sorted((*bound.values(), *others), key=_pci_order))

    @cached_property
    def cards_by_gpu(self) -> Mapping[str, Card]:
        """The published cards by GPU UUID. Omits GPUs that cannot be used whole: this plugin never
        destroys static MIG devices.
        """
        return {gpu.uuid: card for gpu, card in self._cards() if _is_whole(gpu)}

    @cached_property
    def lost_uuids(self) -> frozenset[str]:
        """The UUIDs of the GPUs that do not respond."""
        return frozenset(gpu.uuid for gpu in self.lost)

    @cached_property
    def gpu_names(self) -> Mapping[str, str]:
        """The device name of every GPU by UUID. GPUs under vfio are included so that names do not change
        while they are bound.
        """
        minors = {gpu.uuid: gpu.minor for gpu in (*self.offered_gpus, *self.every_gpu)}
        if self.kept_names is None:
            return gpu_device_names(minors)
        return gpu_minor_names(minors, self.kept_names)

    @cached_property
    def by_name(self) -> Mapping[str, OfferedDevice]:
        """Every published device by name, in publishing order."""
        return {device.name: device for device in self._offered()}

    @cached_property
    def withheld_by_name(self) -> Mapping[str, StaticMigDevice]:
        """MIG devices that this plugin does not manage, on partitioned GPUs, by the name that they would have."""
        return {
            (name := mig_device_name(self.gpu_names[gpu.uuid], mig)): StaticMigDevice(name, gpu, mig)
            for gpu in self.every_gpu
            if gpu.partitioning is not None
            for mig in gpu.mig_devices
        }

    @cached_property
    def returning_by_name(self) -> Mapping[str, OfferedDevice]:
        """Devices that are unpublished only until the plugin destroys its own instances in their place, or
        returns their GPU to the NVIDIA driver.
        """
        return {device.name: device for device in self._returning()}

    def usable(self, name: str) -> OfferedDevice | None:
        """Return the device of this name if it is published, or becomes available as soon as a claim needs it;
        else None.
        """
        return self.by_name.get(name) or self.returning_by_name.get(name)

    def without_partitions(self) -> Inventory:
        """Return the inventory for an API server without partitionable devices: without MIG devices on demand
        and without GPUs for virtual machines.
        """
        gpus = tuple(_unpartitioned(gpu) for gpu in self.gpus)
        lost = tuple(_unpartitioned(gpu) for gpu in self.lost)
        return replace(self, gpus=gpus, lost=lost, cards=())

    def devices(self) -> Iterable[OfferedDevice]:
        """Every published device, in publishing order."""
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
    """Whether the GPU can be used whole."""
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
