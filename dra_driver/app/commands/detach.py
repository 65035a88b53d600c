"""`detach`: every instance of gpu-dra-driver on this node closes NVML for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from dra_driver.app.commands.machine import CommandMachine
from dra_driver.errors import NvmlUnavailableError, StateError
from dra_driver.inventory.detachment import detach
from dra_driver.inventory.rules.gpu_names import named_gpus
from dra_driver.inventory.rules.nvlink import with_nvlink_domains
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps
from dra_driver.settings import Settings


def detach_node(settings: Settings, seconds: int, gpus: Sequence[str], *, force: bool) -> str:
    """Have every instance of gpu-dra-driver on this node close NVML for `seconds`; returns a text for the user. `gpus`
    are those whose claims count, all if empty.

    Raises: ClaimsInTheWayError, unless `force`; InvalidConfigError if there is no such GPU; NvmlInUseError if an
    instance does not close it; StateError.
    """
    machine = CommandMachine(settings)
    chosen = chosen_gpus(machine, gpus) if gpus and not force else None

    def concerns(record: ClaimRecord) -> bool:
        return chosen is None or not record.gpu_uuids.isdisjoint(chosen)

    def claims() -> list[str]:
        state = machine.state()
        if state.faults:
            raise StateError(f"not all claims are known: {state.faults[0]}")
        found = [f"{one.ref.namespace}/{one.ref.name}" for one in state.records if concerns(one)]
        pending = [
            one.record.ref
            for one in state.cleanups
            if concerns(one.record) and any(isinstance(step, RunMps) for step in one.steps)
        ]
        return found + [f"{ref.namespace}/{ref.name} (ended, but its MPS daemon is left)" for ref in pending]

    made = detach(machine.detachments, seconds, None if force else claims)
    return (
        f"no instance of gpu-dra-driver has NVML open; none opens it before {made.until}\n"
        "no device of this node is offered meanwhile; `gpu-dra-driver detach --end` ends that"
    )


def chosen_gpus(machine: CommandMachine, names: Sequence[str]) -> frozenset[str]:
    """The UUIDs of named GPUs, also of one that was lost, and while NVML is closed. Raises: InvalidConfigError."""
    inventory = None
    with suppress(NvmlUnavailableError), ExitStack() as session:
        inventory = with_nvlink_domains(machine.open_nvml(session).read_inventory())
    shown = {gpu.pci_bus_id for gpu in inventory.gpus} if inventory is not None else set()
    is_whole = machine.sysfs.gpu_functions() <= shown
    return named_gpus(names, inventory, known_gpus(machine), is_whole=is_whole)


def known_gpus(machine: CommandMachine) -> Mapping[str, str]:
    """The UUIDs that files of the plugin and of the NVIDIA driver know, by device name, PCI bus ID and UUID."""
    known: dict[str, str] = {}
    state = machine.state()
    for record in state.records:
        known |= {held.device: held.gpu_uuid for held in record.devices}
        known |= {uuid: uuid for uuid in record.gpu_uuids}
    for entry in state.health:
        known[entry.target.gpu_uuid] = entry.target.gpu_uuid
        if entry.pci_bus_id is not None:
            known[entry.pci_bus_id] = entry.target.gpu_uuid
    for bus_id, uuid in machine.sysfs.gpus_of_the_nvidia_driver().items():
        if uuid is not None:
            known |= {bus_id: uuid, uuid: uuid}
    known |= {name: uuid for uuid, name in gpu_device_names(sorted(set(known.values()))).items()}
    return known


def attach_node(settings: Settings) -> str:
    """End what `detach_node` began. Raises: StateError."""
    detachments = CommandMachine(settings).detachments
    was = detachments.now()
    detachments.end()
    return "the node was not detached" if was is None else "gpu-dra-driver opens NVML again"
