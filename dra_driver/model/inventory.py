"""A snapshot of the node: what discovery found, what it could not read, and what it did not see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import gpu_device_names, mig_device_name
from dra_driver.model.mig import MigDevice


@dataclass(frozen=True, slots=True)
class DriverVersions:
    """Versions as NVML reports them: driver `570.124.06`, CUDA as (12, 8); None where unknown."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DiscoveryFault:
    """Something that could not be read. `subject` names the GPU or PCI function, `text` the cause."""

    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class WholeGpu:
    """A GPU that is offered whole, under its device name."""

    name: str
    gpu: Gpu

    @property
    def uuid(self) -> str:
        """The UUID that CUDA and nvidia-smi show."""
        return self.gpu.uuid


@dataclass(frozen=True, slots=True)
class MigPartition:
    """A MIG device that exists, under its device name."""

    name: str
    gpu: Gpu
    mig: MigDevice

    @property
    def uuid(self) -> str:
        """The UUID that CUDA and nvidia-smi show."""
        return self.mig.uuid


OfferedDevice = WholeGpu | MigPartition


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the node in PCI order, with the NVLink domain of each GPU UUID that has one.

    Without slots, because what follows from the GPUs is computed once and kept.
    """

    versions: DriverVersions = DriverVersions()
    gpus: tuple[Gpu, ...] = ()
    nvlink_domains: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[DiscoveryFault, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, OfferedDevice]:
        """Every device on offer by its name, in publishing order."""
        return {device.name: device for device in self._offered()}

    def devices(self) -> Iterable[OfferedDevice]:
        """Every device on offer, in publishing order: a GPU in MIG mode is never offered whole."""
        return self.by_name.values()

    def _offered(self) -> Iterator[OfferedDevice]:
        names = gpu_device_names(gpu.uuid for gpu in self.gpus)
        for gpu in self.gpus:
            name = names[gpu.uuid]
            if not gpu.mig_enabled:
                yield WholeGpu(name, gpu)
                continue
            for mig in sorted(gpu.mig_devices, key=_mig_order):
                yield MigPartition(mig_device_name(name, mig), gpu, mig)


def _mig_order(mig: MigDevice) -> tuple[int, int, int]:
    return (mig.placement.start, mig.profile.profile_id, mig.compute_instance_id)
