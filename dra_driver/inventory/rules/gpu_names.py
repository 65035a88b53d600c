"""The names that a person may give a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from dra_driver.errors import InvalidConfigError
from dra_driver.model.inventory import Inventory


def named_gpus(names: Iterable[str], inventory: Inventory) -> frozenset[str]:
    """The UUIDs of the GPUs with these device names, UUIDs, indices or PCI bus IDs, in any case of letters.

    Raises: InvalidConfigError for a name that no GPU has.
    """
    known: dict[str, str] = {}
    for gpu in inventory.every_gpu:
        for name in (gpu.uuid, gpu.pci_bus_id, gpu.index):
            if name is not None:
                known[str(name).lower()] = gpu.uuid
    for device in inventory.by_name.values():
        known[device.name.lower()] = device.gpu.uuid
    wanted = {name: known.get(name.lower()) for name in names}
    missing = [name for name, uuid in wanted.items() if uuid is None]
    if missing:
        rows = ", ".join(f"{gpu.index}={gpu.pci_bus_id}" for gpu in inventory.every_gpu) or "none"
        raise InvalidConfigError(
            f"there is no GPU {missing[0]!r}; give a device name, a UUID, an index or a PCI bus ID (GPUs: {rows})"
        )
    return frozenset(uuid for uuid in wanted.values() if uuid is not None)
