"""`gpu-dra-driver detach`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from dra_driver.app.settings import Flag, Settings
from dra_driver.cli.flags import OF_NODE, switch
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.scratch import node_settings
from dra_driver.errors import InvalidConfigError, NvmlUnavailableError, StateError
from dra_driver.inventory import detachment
from dra_driver.inventory.rules.assembly import with_nvlink_domains
from dra_driver.inventory.rules.gpu_names import named_gpus
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.maintenance import CLOSED_TIMES, closed_seconds
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps

FLAGS = (
    Flag(
        "gpus",
        "The GPUs to change: device name, UUID, index or PCI bus ID. Only claims on these GPUs are checked.",
        metavar="GPU",
        shown="all",
        count="*",
    ),
    Flag(
        "duration",
        "How long NVML stays closed, such as 90s, 5m or 2h; 10s to 24h.",
        spelled=("--for",),
        env=(),
        metavar="TIME",
        shown="5m",
    ),
    switch("force", "Detach even if claims use the GPUs."),
    switch("end", "End the detachment now."),
    *OF_NODE,
)
EXAMPLES = ("0000:1b:00.0 --for 10m", "--end")


def detach(given: Namespace) -> None:
    """While NVML is closed, you can reset GPUs, switch MIG modes and unload the NVIDIA driver. The command returns
    when every instance of gpu-dra-driver on this node has closed NVML. Until the time is over, the node publishes no
    devices. Then gpu-dra-driver opens NVML again, and restores time slices and compute modes. The command fails while
    claims use the GPUs. Run it as root on the node, or with kubectl exec in the pod of gpu-dra-driver.
    """

    if given.end and (given.gpus or given.force or given.duration is not None):
        raise InvalidConfigError("--end cannot be combined with GPUs, --for or --force")
    seconds = closed_seconds("5m" if given.duration is None else given.duration)
    if seconds is None:
        raise InvalidConfigError(f"--for {given.duration}: give {CLOSED_TIMES}")
    settings = node_settings(given)
    if given.end:
        print(attach_node(settings))
    else:
        print(detach_node(settings, seconds, given.gpus or [], force=given.force))


def detach_node(settings: Settings, seconds: int, gpus: Sequence[str], *, force: bool) -> str:
    """Close NVML in every instance of gpu-dra-driver on this node for `seconds`; returns a text for the user.

    Raises: ClaimsInTheWayError if a claim uses one of `gpus` (if empty, any GPU), unless `force`; InvalidConfigError
    for an unknown GPU; NvmlInUseError if an instance does not close NVML; DeviceBusyError while a maintenance claim
    keeps NVML closed, also with `force`: its pod relies on the time; StateError.
    """
    machine = CommandMachine(settings)
    chosen = chosen_gpus(machine, gpus) if gpus and not force else None

    def concerns(record: ClaimRecord) -> bool:
        if chosen is None or not record.gpu_uuids.isdisjoint(chosen):
            return True
        lasting = machine.detachments.now()  # NVML is closed for all GPUs
        return lasting is not None and lasting.claim == record.ref

    def claims() -> list[str]:
        state = machine.state()
        if state.faults:
            raise StateError(f"some claims are unknown: {state.faults[0]}")
        found = [f"{one.ref.namespace}/{one.ref.name}" for one in state.records if concerns(one)]
        pending = [
            one.record.ref
            for one in state.cleanups
            if concerns(one.record) and any(isinstance(step, RunMps) for step in one.steps)
        ]
        return found + [
            f"{ref.namespace}/{ref.name} (gone, but its MPS daemon still runs)" for ref in pending
        ]

    before = machine.detachments.now()
    made = detachment.detach(machine.detachments, seconds, None if force else claims)
    instead = f" (instead of {before.until})" if before is not None else ""
    return (
        f"gpu-dra-driver has closed NVML until {made.until}{instead}\n"
        "until then, this node publishes no devices; `gpu-dra-driver detach --end` ends the detachment"
    )


def chosen_gpus(machine: CommandMachine, names: Sequence[str]) -> frozenset[str]:
    """Return the UUIDs of the named GPUs, including lost ones. Raises: InvalidConfigError.

    NVML is opened only for names that the files lack, because a GPU may hang.
    """
    known, inventory = known_gpus(machine), None
    with suppress(InvalidConfigError):
        return named_gpus(names, None, known, is_whole=True)
    with suppress(NvmlUnavailableError), ExitStack() as session:
        inventory = with_nvlink_domains(machine.open_nvml(session).read_inventory())
    shown = {gpu.pci_bus_id for gpu in inventory.gpus} if inventory is not None else set()
    is_whole = machine.sysfs.gpu_functions() <= shown
    return named_gpus(names, inventory, known, is_whole=is_whole)


def known_gpus(machine: CommandMachine) -> Mapping[str, str]:
    """Return UUIDs from files, by device name, PCI bus ID and UUID."""
    known: dict[str, str] = {}
    state = machine.state()
    for record in state.records:
        known |= {held.device: held.gpu_uuid for held in record.devices}
        known |= {uuid: uuid for uuid in record.gpu_uuids}
    for entry in state.health.states:
        known[entry.target.gpu_uuid] = entry.target.gpu_uuid
        if entry.pci_bus_id is not None:
            known[entry.pci_bus_id] = entry.target.gpu_uuid
    for bus_id, uuid in machine.sysfs.gpus_of_the_nvidia_driver().items():
        if uuid is not None:
            known |= {bus_id: uuid, uuid: uuid}
    known |= {name: uuid for uuid, name in gpu_device_names(sorted(set(known.values()))).items()}
    return known


def attach_node(settings: Settings) -> str:
    detachments = CommandMachine(settings).detachments
    was = detachments.detached()
    detachments.end()
    return "there was no detachment to end" if was is None else "gpu-dra-driver opens NVML again"
