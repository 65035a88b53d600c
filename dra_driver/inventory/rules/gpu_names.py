from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from dra_driver.errors import InvalidConfigError
from dra_driver.model.ids import gpu_of_device, names_gpus_by
from dra_driver.model.inventory import Inventory
from dra_driver.model.record import ClaimRecord
from dra_driver.model.units import counted

_MAX_NAMED = 5


def held_gpu_names(records: Iterable[ClaimRecord]) -> Mapping[str, str]:
    return {
        held.gpu_uuid: gpu_of_device(held.device)
        for record in records
        for held in record.devices
        if held.kind != "vfio"
    }


def refuse_other_names(device_names: Literal["uuid", "minor"], records: Sequence[ClaimRecord]) -> None:
    """Raise InvalidConfigError if records have devices with the other kind of name, which no device would have."""
    other = "uuid" if device_names == "minor" else "minor"
    found = {
        f"{record.ref.namespace}/{record.ref.name} ({held.device})": None
        for record in records
        for held in record.devices
        if names_gpus_by(held.device) == other
    }
    if found:
        shown = [*found][:_MAX_NAMED] + (["…"] if len(found) > _MAX_NAMED else [])
        raise InvalidConfigError(
            f"device names cannot change from {other} to {device_names} on this node, because claims still "
            f"hold {counted(len(found), 'device')}: {', '.join(shown)}; set --device-names {other} again, drain "
            "the node, and change the flag when `gpu-dra-driver claims` and `gpu-dra-driver cleanup` list nothing"
        )


def named_gpus(
    names: Iterable[str], inventory: Inventory | None, known: Mapping[str, str], *, is_whole: bool
) -> frozenset[str]:
    """Return the UUIDs of the GPUs with these device names, UUIDs, indices or PCI bus IDs. Case is ignored.

    `known` maps other known names to UUIDs, such as the name of a lost GPU. Unless `is_whole`, NVML does not show every
    GPU on the bus, and the indices may have shifted. Raises: InvalidConfigError.
    """
    found = {name.lower(): uuid for name, uuid in known.items()}
    indices: dict[str, str] = {}
    for gpu in inventory.offered_gpus if inventory is not None else ():
        found[gpu.uuid.lower()] = gpu.uuid
        if gpu.pci_bus_id is not None:
            found[gpu.pci_bus_id.lower()] = gpu.uuid
        if gpu.index is not None:
            indices[str(gpu.index)] = gpu.uuid
    if inventory is not None:
        found |= {name: uuid for uuid, name in inventory.gpu_names.items()}
        found |= {name: device.gpu.uuid for name, device in inventory.by_name.items()}
    wanted: set[str] = set()
    for name in names:
        if name.isdecimal() and (inventory is None or not is_whole):
            raise InvalidConfigError(
                f"index {name} is not reliable, because NVML does not show every GPU now; use a UUID or a PCI bus "
                "ID"
            )
        uuid = indices.get(name) or found.get(name.lower())
        if uuid is None and name.startswith("GPU-") and not is_whole:
            uuid = name  # an unknown lost GPU, which no claim can use
        if uuid is None:
            rows = ", ".join(f"{index}={uuid}" for index, uuid in indices.items()) or "NVML shows none now"
            raise InvalidConfigError(
                f"there is no GPU {name!r}; use a device name, a UUID, an index or a PCI bus ID (GPUs: {rows})"
            )
        wanted.add(uuid)
    return frozenset(wanted)
