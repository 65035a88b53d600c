"""`gpu-dra-driver inspect`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress

from dra_driver.app.settings import FLAGS as SETTINGS
from dra_driver.app.settings import Flag, Settings
from dra_driver.cli.flags import of_run, switch
from dra_driver.cli.machine import CommandMachine, answered, unread
from dra_driver.cli.output import (
    OUTPUT,
    Output,
    device_table,
    hanging,
    print_objects,
    terminal_width,
    value_of,
)
from dra_driver.cli.rules.mig_map import GpuMap, gpu_maps, waiting_for_mig_mode
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.scratch import scratch_settings
from dra_driver.cli.state_on_disk import plugin_runs
from dra_driver.errors import InvalidConfigError, NotSupportedError, NvmlUnavailableError, StateError
from dra_driver.health.rules.taints import TaintPolicy, device_taints, instances_by_device, withdrawals
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import discover_once
from dra_driver.journal.rules.cleanups import withholding
from dra_driver.mig.offer import MigOwnership
from dra_driver.model.dataclass import replace
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import printable
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.mig import MigProfile, OwnedInstance, OwnedMode
from dra_driver.model.schema import JsonObject
from dra_driver.nvml.mig_reading import read_machine_profiles
from dra_driver.slices.rules.build import Taints, build_pool, none_withheld, untainted
from dra_driver.slices.rules.diff import Owner, slice_changes

WIDTH = 100
_WIDEST_CELL = 18
_MAX_SLICES = 16

FLAGS = (
    *of_run("simulate"),
    OUTPUT,
    *of_run("node_name", "driver_name", "nvidia_driver_root", "container_driver_root", "simulator_dir"),
    *of_run("config", "dynamic_mig", "passthrough", "device_names", "consumable_shares", "imex_channel"),
    replace(
        SETTINGS["kubelet_plugins_directory_path"],
        help="Directory with the records and the saved health of gpu-dra-driver.",
    ),
    Flag(
        "gpus",
        "Show only these GPUs: device name, index, UUID or PCI bus ID.",
        metavar="GPU",
        shown="all",
        count="*",
    ),
    switch("mig", "Print only the drawings of GPUs in MIG mode or with MIG devices on demand."),
)
EXAMPLES = ("--simulate dgx-h100", "--simulate dgx-h100 --dynamic-mig --mig gpu-6b45fc99", "-o yaml")


def inspect(given: Namespace) -> None:
    """Needs no cluster and changes nothing. -o json and -o yaml print the ResourceSlices. The table lists the
    devices. Below it, drawings show the memory slices of each GPU in MIG mode or with MIG devices on demand: its MIG
    devices, their claims, and the free room. Identical unused GPUs share a drawing, and their MIG devices on demand
    share rows. Read errors go to standard error.
    """
    output, mig = given.output, given.mig
    if mig and not output.is_for_people:
        raise InvalidConfigError(f"--mig cannot be combined with -o {output}")
    # A machine that is simulated only for this command has no saved state.
    is_empty = given.simulate is not None and given.simulator_dir is None
    with scratch_settings("inspect", vars(given), given.config, "error") as settings:
        machine = CommandMachine(settings)

        def look() -> tuple[list[JsonObject], list[str], list[GpuMap]]:
            maps: list[GpuMap] = []
            more: list[str] = []
            with ExitStack() as session:
                if output.is_for_people:
                    # Without --mig, this still prints the slices, or their error, if NVML does not answer.
                    with nullcontext() if mig else suppress(NvmlUnavailableError):
                        maps, more = mig_maps(machine, session)
                slices, notes = ([], []) if mig else slices_to_publish(machine, is_empty=is_empty)[:2]
            return slices, [*notes, *more], maps

        slices, notes, maps = answered(settings, look)
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    devices = [device for entry in slices for device in entry["spec"].get("devices", [])]
    if given.gpus:
        if not output.is_for_people:
            names = ", ".join(given.gpus)
            raise InvalidConfigError(
                f"-o {output} prints whole slices, not single GPUs; run the command without {names}"
            )
        known = {name for device in devices for name in _names(device)} | {
            name for one in maps for name in one.called
        }
        unknown = [name for name in given.gpus if name not in known]
        if unknown:
            raise InvalidConfigError(
                f"there is no GPU {unknown[0]} on this node; `gpu-dra-driver inspect` lists the GPUs"
            )
        devices = [device for device in devices if not _names(device).isdisjoint(given.gpus)]
        maps = [one for one in maps if not one.called.isdisjoint(given.gpus)]
    width = terminal_width(all_columns=output is Output.wide)
    if not output.is_for_people:
        print_objects(slices, output)
    elif not mig and devices:
        print("\n".join(device_table(devices, width)))
    elif mig and not maps:
        print(
            "no GPU is in MIG mode or has MIG devices on demand (--dynamic-mig)",
            file=sys.stderr,
        )
    if maps:
        print(("" if mig else "\n") + draw_gpus(maps, width), end="")
    if not mig and not devices:
        raise NotSupportedError(
            "no device would be published: neither the PCI bus nor NVML (libnvidia-ml.so.1) shows a usable GPU; "
            "`gpu-dra-driver doctor` shows the cause"
        )


def _names(device: JsonObject) -> set[str]:
    name, attributes = str(device["name"]), device.get("attributes", {})
    keys = ("index", "uuid", "resource.kubernetes.io/pciBusID", "parentIndex", "parentUUID")
    return {
        name,
        name.partition("-mig-")[0],
        *(value_of(attributes[key]) for key in keys if key in attributes),
    }


class OwnershipUnknownError(StateError):
    """It is unknown which MIG devices gpu-dra-driver created."""


def slices_to_publish(
    machine: CommandMachine, *, is_empty: bool = False
) -> tuple[list[JsonObject], list[str], Inventory]:
    """Return the slices that `run` would publish here, notes, and the inventory.

    An empty machine has healthy devices, no claims, no pending cleanup, and no MIG devices that were created for
    claims.

    Raises: NvmlUnavailableError; for an empty machine OwnershipUnknownError.
    """
    settings, state = machine.settings, machine.state()
    ledger = None if state.ledger_fault is not None else machine.ledger()

    def has_made_devices(gpu: Gpu) -> bool:
        return ledger is not None and bool(
            ledger.details(OwnedInstance, gpu.uuid) or ledger.details(OwnedMode, gpu.uuid)
        )

    def on_demand(gpu: Gpu) -> bool:
        # gpu-dra-driver may create its MIG devices again, even if this command runs without --dynamic-mig.
        return machine.is_on_demand(gpu) or (is_empty and has_made_devices(gpu))

    reader = machine.nvml_reader(on_demand)
    with closing(reader.session):
        files = DriverRoot(machine.paths, nodes=machine.nodes)
        host = Sysfs(machine.paths.sys, machine.paths.proc)
        imex = None if settings.imex_channel is None else ImexChannelNodes(machine.paths.proc)
        ownership = None if ledger is None else MigOwnership(ledger, all_undone=is_empty)
        inventory = discover_once(reader, host, ownership, machine.cards, files=files, imex=imex)
    if is_empty and state.ledger_fault is not None and any(gpu.mig_enabled for gpu in inventory.gpus):
        raise OwnershipUnknownError(
            f"gpu-dra-driver cannot determine which MIG devices it created: {state.ledger_fault}"
        )
    taints, withheld, faults = (untainted, none_withheld, []) if is_empty else _kept_taints(machine, state)
    pool = build_pool(inventory, settings.node_name, settings.sharing, taints, withheld, power=settings.power)
    changes = slice_changes(pool, (), Owner(settings.driver_name, settings.node_name, ""))
    slices = [
        {**entry, "metadata": {"generateName": entry["metadata"]["generateName"]}}
        for entry in changes.creates
    ]
    return slices, [*unread(inventory), *faults, *pool.faults, *pool.notes], inventory


def _kept_taints(
    machine: CommandMachine, state: NodeState
) -> tuple[Taints, Callable[[OfferedDevice], bool], list[str]]:
    """Return functions for a device's taints and whether it is withdrawn, and notes."""
    settings = machine.settings
    states = {entry.target: entry for entry in state.health.states}
    instances = instances_by_device(state.owned)
    policy = TaintPolicy(dict(settings.taint_effects))
    layouts = {one.gpu_uuid: one for one in state.layouts}

    def taints(device: OfferedDevice) -> tuple[JsonObject, ...]:
        pending = withholding(state.cleanups, device, machine.boot_id or "")
        return device_taints(device, states, instances, policy, pending, layouts.get(device.gpu.uuid))

    withdraws = settings.unhealthy_devices == "withdraw"
    ill = withdrawals(taints, state.records, settings.sharing) if withdraws else none_withheld
    serviced = {uuid: one for one in state.maintenances for uuid in one.gpu_uuids}
    notes = [
        f"{uuid}: withdrawn for maintenance claim {one.name}, {one.text}" for uuid, one in serviced.items()
    ]
    if any(entry.reasons for entry in states.values()) and not plugin_runs(settings.plugin_directory):
        notes.append(
            "gpu-dra-driver is not running on this node, so the health of the GPUs is unknown; devices have the taints "
            "of the health that it saved last"
        )
    return (
        taints,
        lambda device: device.gpu.uuid in serviced or ill(device),
        [*notes, *state.notes, *state.faults],
    )


def possible_profiles(settings: Settings) -> tuple[list[MigProfile], list[str]]:
    """Return MIG profiles, and read errors. Raises: NvmlUnavailableError."""
    with ExitStack() as session:
        CommandMachine(settings).open_nvml(session)
        profiles, faults = read_machine_profiles()
    return profiles, [f"{fault.subject}: {fault.text}" for fault in faults]


def mig_maps(machine: CommandMachine, session: ExitStack) -> tuple[list[GpuMap], list[str]]:
    """Return the drawings' content, and notes. Raises: NvmlUnavailableError.

    NVML stays open until `session` is closed, because reopening it after its last client takes seconds.
    """
    inventory = machine.open_nvml(session).read_inventory()
    notes = [*unread(inventory), *waiting_for_mig_mode(inventory, machine.is_on_demand)]
    state = machine.state()
    maps = gpu_maps(inventory, state, machine.is_on_demand)
    notes += [
        f"GPU {one.gpu_uuid}: MIG layout {one.layout}: {one.state} {one.text}".rstrip()
        for one in state.layouts
    ]
    return maps, notes + (list(state.faults) if maps else [])


# --- the drawing ----------------------------------------------------------------------------------


def draw_gpus(maps: Iterable[GpuMap], width: int | None = None) -> str:
    """Draw equal unused GPUs once."""
    alike: dict[GpuMap, list[str]] = {}
    for entry in maps:
        is_free = not entry.instances and entry.whole_owner is None
        key = replace(entry, name="" if is_free else entry.name, called=frozenset())
        alike.setdefault(key, []).append(entry.name)
    return "\n".join(draw_gpu(replace(entry, name=", ".join(names)), width) for entry, names in alike.items())


def draw_gpu(entry: GpuMap, width: int | None = None) -> str:
    """Return the drawing of a GPU.

    0           1           2           3
    +-----------+-----------+-----------------------+
    | 1g.6gb    | free      | 2g.12gb               |
    | GI3 CI0   |           | GI1 CI0               |
    +-----------+-----------+-----------------------+
    """
    width = min(WIDTH, width or WIDTH)
    headline = f"{entry.name}: {entry.product or 'unknown product'}, MIG mode {entry.mode}"
    lines = [hanging("", headline, width), *_boxes(entry, width)]
    for one in entry.instances:
        bare = one.gpu_instance_id is not None and not one.compute_instance_ids
        ids = f"{one.ids} without compute instance" if bare else one.ids
        lines.append(hanging(f"  {one.slices}, {one.profile}, {ids}: ", one.holder, width))
    if entry.whole_owner is not None:
        lines.append(hanging("  whole GPU: ", entry.whole_owner, width))
    room = ", ".join(f"{name} x{count}" for name, count in entry.room if count > 0)
    return "\n".join([*lines, hanging("  room for: ", room or "nothing", width), ""])


def _boxes(entry: GpuMap, width: int) -> list[str]:
    if not 0 < entry.memory_slices <= _MAX_SLICES:
        return []
    pitch = min(_WIDEST_CELL, (width - 1) // entry.memory_slices)
    boxes = [(size * pitch - 1, (title, ids)) for size, title, ids in _row(entry)]
    frame = "+".join(["", *("-" * inner for inner, _ in boxes), ""])
    numbers = "".join(f"{number:<{pitch}}" for number in range(entry.memory_slices))
    texts = (
        "|".join(["", *(f"{' ' + printable(of[line]):<{inner}.{inner}}" for inner, of in boxes), ""])
        for line in (0, 1)
    )
    return [f"  {numbers}".rstrip(), frame, *texts, frame]


def _row(entry: GpuMap) -> Iterator[tuple[int, str, str]]:
    if entry.whole_owner is not None and not entry.instances:
        yield entry.memory_slices, "whole GPU", ""
        return
    at = 0
    for one in entry.instances:
        start, end = max(one.place.start, at), min(one.place.start + one.place.size, entry.memory_slices)
        if start < end:
            yield from [(1, "free", "")] * (start - at)
            yield end - start, one.profile, one.ids.replace("I ", "I")
            at = end
    yield from [(1, "free", "")] * (entry.memory_slices - at)
