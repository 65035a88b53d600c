"""The inventory from what NVML shows, what the PCI bus shows, and what was known before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dra_driver.errors import NvmlUnavailableError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault, Inventory


def unanswering(gpus: Sequence[Gpu], before: Inventory | None) -> tuple[Gpu, ...]:
    """The GPUs with a PCI address that were known before and that NVML does not show among `gpus`."""
    if before is None:
        return ()
    answering = {gpu.uuid for gpu in gpus} | {gpu.pci_bus_id for gpu in gpus}
    return tuple(
        gpu
        for gpu in before.every_gpu
        if gpu.pci_bus_id is not None and answering.isdisjoint((gpu.uuid, gpu.pci_bus_id))
    )


def with_unready_since(gpu: Gpu, before: Inventory | None, now: int) -> Gpu:
    """The GPU; if its fabric is not ready, with the time of the first look that found the fabric in this state."""
    fabric = gpu.unready_fabric
    if fabric is None:
        return gpu
    known = [] if before is None else [old.unready_fabric for old in before.gpus if old.uuid == gpu.uuid]
    since = next((old.since for old in known if old is not None and old.state == fabric.state), now)
    return replace(gpu, unready_fabric=replace(fabric, since=since))


def assembled(
    read: Inventory,
    gpus: tuple[Gpu, ...],
    lost: tuple[Gpu, ...],
    functions: Collection[str],
    before: Inventory | None,
) -> Inventory:
    """The inventory `read` with `gpus` as they are offered and the `lost` ones, which keep their NVLink domain.

    Lost GPUs and those that are cut on demand keep their names, since MIG mode changes the minor number.

    `functions` are the PCI bus IDs of NVIDIA's GPUs on the bus; one that NVML does not show is a fault.

    Raises: NvmlUnavailableError if there are GPUs on the bus but NVML shows none: on a fresh node the NVIDIA driver's
    files come before its GPUs are bound, and an empty pool would be a lie."""
    hidden = sorted(set(functions).difference(gpu.pci_bus_id for gpu in gpus))
    if not gpus and not lost:
        _refuse_empty(read.faults, hidden)
    faults = read.faults + tuple(
        DiscoveryFault(
            f"GPU {bus_id}",
            "it is missing from NVML; it may be lost, drained, or bound to another driver",
        )
        for bus_id in hidden
    )
    known = {} if before is None else before.nvlink_domains
    domains = {gpu.uuid: known[gpu.uuid] for gpu in lost if gpu.uuid in known}
    kept = read.kept_names
    if kept is not None and before is not None:
        staying = {gpu.uuid for gpu in (*gpus, *lost) if gpu.partitioning is not None or gpu in lost}
        kept = {uuid: name for uuid, name in before.gpu_names.items() if uuid in staying} | dict(kept)
    return replace(
        read,
        gpus=gpus,
        lost=lost,
        faults=faults,
        nvlink_domains={**domains, **read.nvlink_domains},
        kept_names=kept,
    )


def _refuse_empty(faults: Sequence[DiscoveryFault], hidden: Sequence[str]) -> None:
    if faults:
        causes = "; ".join(f"{fault.subject}: {fault.text}" for fault in faults)
        raise NvmlUnavailableError(f"no GPU answers NVML: {causes}")
    if hidden:
        raise NvmlUnavailableError(
            f"NVML shows no GPU, but the PCI bus has {len(hidden)} ({', '.join(hidden)}); they are not bound to "
            "the NVIDIA driver (yet): see the kernel log, or wait for the driver's installer"
        )
