"""What has changed in the hardware, and whether it has to be told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dra_driver.model.fingerprint import GpuFingerprint, HostFingerprint, NvmlFingerprint
from dra_driver.model.gpu import Fabric, Gpu
from dra_driver.model.health import PolledHealth
from dra_driver.model.inventory import Inventory


@dataclass(frozen=True, slots=True)
class HardwareFingerprint:
    """What host and NVML show at one moment; `nvml` is None without NVML."""

    host: HostFingerprint
    nvml: NvmlFingerprint | None = None

    @property
    def lost_some(self) -> bool:
        """Whether a GPU did not answer."""
        return None in (self.nvml or ())


def is_other_hardware(now: HostFingerprint, before: HostFingerprint) -> bool:
    """Whether GPUs came or went, or the NVIDIA driver was loaded anew: NVML has to be initialised anew to show it."""
    return (now.hardware, now.driver) != (before.hardware, before.driver)


def repartitioned_gpus(now: HardwareFingerprint, before: HardwareFingerprint) -> frozenset[str] | None:
    """The UUIDs of the GPUs on which MIG mode or instances differ; None where anything else differs too, or where it
    cannot be said on which GPU."""
    if now.nvml is None or before.nvml is None or is_other_hardware(now.host, before.host):
        return None
    if _uuids(now.nvml) != _uuids(before.nvml):
        return None
    pairs = list(zip(now.nvml, before.nvml, strict=True))
    changed = {gpu.uuid for gpu, old in pairs if gpu is not None and gpu != old}
    for minor in now.host.instances.keys() | before.host.instances.keys():
        if now.host.instances.get(minor) == before.host.instances.get(minor):
            continue
        owners = {gpu.uuid for pair in pairs for gpu in pair if gpu is not None and gpu.minor == minor}
        if not owners:
            return None
        changed |= owners
    return frozenset(changed)


def differs(now: Inventory, before: Inventory | None) -> bool:
    """Whether there is anything to publish or report. The minor number of a GPU that is cut on demand does not count:
    its MIG mode changes the number, which is read anew wherever it is needed."""
    return (
        before is None or now.gpu_names != before.gpu_names or _without_minors(now) != _without_minors(before)
    )


def is_other_nvlink(known: Inventory | None, gpu_uuid: str, polled: PolledHealth) -> bool:
    """Whether the number of links that are up, or the registration with the fabric, is not what the inventory says of a
    GPU. What the poll has not read counts for nothing.

    A GPU that is cut on demand keeps both in the inventory while it is in MIG mode, whatever NVML says of it then. So
    for such a GPU only another fabric counts.
    """
    gpu = next((gpu for gpu in known.gpus if gpu.uuid == gpu_uuid), None) if known is not None else None
    if gpu is None:
        return False
    if polled.nvlinks is not None and len(polled.nvlinks.up) != gpu.nvlink_links:
        return True
    if polled.fabric is None:
        return False
    keeps_it = gpu.partitioning is not None and gpu.fabric is not None
    registration = polled.fabric_registration
    return gpu.fabric_registration != registration and (isinstance(registration, Fabric) or not keeps_it)


def _uuids(fingerprint: NvmlFingerprint) -> list[str | None]:
    return [_uuid(gpu) for gpu in fingerprint]


def _uuid(gpu: GpuFingerprint | None) -> str | None:
    return None if gpu is None else gpu.uuid


def _without_minors(inventory: Inventory) -> Inventory:
    return replace(
        inventory,
        gpus=tuple(map(_without_minor, inventory.gpus)),
        lost=tuple(map(_without_minor, inventory.lost)),
    )


def _without_minor(gpu: Gpu) -> Gpu:
    return gpu if gpu.partitioning is None else replace(gpu, minor=None)
