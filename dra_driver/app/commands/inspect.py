"""What `inspect`, `device-classes` and `validate` find out about a machine: slices, MIG devices, MIG profiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from dra_driver.app.commands.machine import CommandMachine, unread
from dra_driver.diagnostics.rules.mig_holders import gpu_maps, waiting_for_mig_mode
from dra_driver.diagnostics.rules.mig_map import GpuMap
from dra_driver.diagnostics.rules.node_state import NodeState, Ownership
from dra_driver.errors import StateError
from dra_driver.health.rules.taints import TaintPolicy, device_taints, instances_by_device, withdrawals
from dra_driver.host.driver_root import DriverRoot
from dra_driver.inventory.discovery import discover_once
from dra_driver.inventory.host_facts import HostView
from dra_driver.journal.rules.cleanups import withholding
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.json_object import JsonObject
from dra_driver.model.mig import MigProfile
from dra_driver.nvml.mig_profiles import read_machine_profiles
from dra_driver.settings import Settings
from dra_driver.slices.rules.build import Taints, build_pool, none_withheld, untainted
from dra_driver.slices.rules.diff import Owner, slice_changes


class OwnershipUnknownError(StateError):
    """It is not known which of a machine's MIG devices gpu-dra-driver made."""


def slices_to_publish(settings: Settings, *, is_empty: bool = False) -> tuple[list[JsonObject], list[str]]:
    """The slices that `run` would publish on this machine, and what is not published as asked for. An empty machine has
    no ill devices, no claims and no pending cleanup, and what gpu-dra-driver made for claims is gone.

    Raises: NvmlUnavailableError; for an empty machine OwnershipUnknownError.
    """
    machine = CommandMachine(settings)
    state = machine.state()
    ownership = Ownership(state, ended=is_empty)

    def on_demand(gpu: Gpu) -> bool:
        # MIG devices come back where gpu-dra-driver made some, also if this command is run without that setting.
        return machine.is_on_demand(gpu) or (is_empty and ownership.makes_devices_of(gpu.uuid))

    reader = machine.nvml_reader(on_demand)
    with closing(reader.session):
        files = DriverRoot(machine.paths, nodes=machine.nodes)
        host = HostView(machine.paths, imex=settings.imex_channel is not None, files=files)
        inventory = discover_once(reader, host, ownership, machine.cards)
    if is_empty and state.ledger_fault is not None and any(gpu.mig_enabled for gpu in inventory.gpus):
        raise OwnershipUnknownError(
            f"which MIG devices gpu-dra-driver made is not known: {state.ledger_fault}"
        )
    taints, withheld, faults = (untainted, none_withheld, []) if is_empty else _kept_taints(machine, state)
    pool = build_pool(inventory, settings.node_name, settings.sharing, taints, withheld)
    changes = slice_changes(pool, (), Owner(settings.driver_name, settings.node_name, ""))
    slices = [
        {**entry, "metadata": {"generateName": entry["metadata"]["generateName"]}}
        for entry in changes.creates
    ]
    return slices, [*unread(inventory), *faults, *pool.faults, *pool.notes]


def _kept_taints(
    machine: CommandMachine, state: NodeState
) -> tuple[Taints, Callable[[OfferedDevice], bool], list[str]]:
    """The taints that devices have, and which ones are withdrawn, by what gpu-dra-driver keeps on disk; and what of
    that could not be read. The API server is not asked whether it keeps taints."""
    settings = machine.settings
    states = {entry.target: entry for entry in state.health}
    instances = instances_by_device(state.owned)
    policy = TaintPolicy(dict(settings.taint_effects))
    layouts = {one.gpu_uuid: one for one in state.layouts}

    def taints(device: OfferedDevice) -> tuple[JsonObject, ...]:
        pending = withholding(state.cleanups, device, machine.boot_id or "")
        return device_taints(device, states, instances, policy, pending, layouts.get(device.gpu.uuid))

    withdraws = settings.unhealthy_devices == "withdraw"
    withheld = withdrawals(taints, state.records, settings.sharing) if withdraws else none_withheld
    return taints, withheld, [*state.notes, *state.faults]


def possible_profiles(settings: Settings) -> tuple[list[MigProfile], list[str]]:
    """The MIG profiles of this machine's GPUs, each once, and what could not be read.

    Raises: NvmlUnavailableError.
    """
    with ExitStack() as session:
        CommandMachine(settings).open_nvml(session)
        profiles, faults = read_machine_profiles()
    return profiles, [f"{fault.subject}: {fault.text}" for fault in faults]


def mig_maps(settings: Settings, session: ExitStack) -> tuple[list[GpuMap], list[str]]:
    """What to draw of each GPU that is in MIG mode or whose MIG devices are made on demand, and what could not be read.

    NVML stays open until `session` is closed: opening it anew after its last client takes seconds.
    Raises: NvmlUnavailableError.
    """
    machine = CommandMachine(settings)
    inventory = machine.open_nvml(session).read_inventory()
    notes = [*unread(inventory), *waiting_for_mig_mode(inventory, machine.is_on_demand)]
    state = machine.state()
    maps = gpu_maps(inventory, state, machine.is_on_demand)
    notes += [
        f"GPU {one.gpu_uuid}: MIG layout {one.layout}: {one.state} {one.text}".rstrip()
        for one in state.layouts
    ]
    return maps, notes + (list(state.faults) if maps else [])
