"""`gpu-dra-driver inspect`: the slices that this machine would publish, without a cluster."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dra_driver.cli.flags import of_run, switch
from dra_driver.cli.output import OUTPUT, Output, print_objects
from dra_driver.cli.scratch import scratch_settings
from dra_driver.cli.tables import device_table, terminal_width, value_of
from dra_driver.model.ids import printable
from dra_driver.model.json_object import JsonObject
from dra_driver.settings import FLAGS as SETTINGS
from dra_driver.settings import Flag

if TYPE_CHECKING:
    from dra_driver.diagnostics.rules.mig_map import GpuMap


_WAIT_S = 60.0
"""Without another client NVML wakes every GPU first, which takes seconds each."""


FLAGS = (
    *of_run("simulate"),
    OUTPUT,
    *of_run("node_name", "driver_name", "nvidia_driver_root", "container_driver_root", "simulator_dir"),
    *of_run("config", "dynamic_mig", "passthrough", "device_names", "consumable_shares", "imex_channel"),
    replace(
        SETTINGS["kubelet_plugins_directory_path"], help="Where gpu-dra-driver keeps records and health."
    ),
    Flag(
        "gpus",
        "Only these GPUs: device name, index, UUID or PCI bus ID.",
        metavar="GPU",
        shown="all",
        count="*",
    ),
    switch("mig", "Print only the drawing of the GPUs that are partitioned into MIG devices."),
)
EXAMPLES = ("--simulate dgx-h100", "--simulate dgx-h100 --dynamic-mig --mig gpu-6b45fc99", "-o yaml")


def inspect(given: Namespace) -> None:
    """No cluster is needed. -o json and -o yaml print the objects themselves. The table shows the devices; below it are
    the memory slices of each GPU in MIG mode or with MIG devices on demand: what exists, who holds it, and what there
    is room for. GPUs that differ in nothing share rows and drawings. Changes nothing. What could not be read is printed
    on standard error.
    """
    from dra_driver.app.commands.inspect import mig_maps, slices_to_publish
    from dra_driver.concurrency.bounded_call import bounded
    from dra_driver.errors import InvalidConfigError, NotSupportedError, NvmlUnavailableError

    output, mig = given.output, given.mig
    if mig and not output.is_for_people:
        raise InvalidConfigError(f"--mig prints a drawing for people; leave out -o {output}, or --mig")
    # A machine that is simulated just for this command has no past.
    is_empty = given.simulate is not None and given.simulator_dir is None
    with scratch_settings("inspect", vars(given), given.config, "error") as settings:

        def look() -> tuple[list[JsonObject], list[str], list[GpuMap]]:
            maps: list[GpuMap] = []
            more: list[str] = []
            with ExitStack() as session:
                if output.is_for_people:
                    # Without --mig a node without NVML has its slices, or its error, all the same.
                    with nullcontext() if mig else suppress(NvmlUnavailableError):
                        maps, more = mig_maps(settings, session)
                slices, notes = ([], []) if mig else slices_to_publish(settings, is_empty=is_empty)
            return slices, [*notes, *more], maps

        slices, notes, maps = bounded("NVML", look, _WAIT_S)
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    devices = [device for entry in slices for device in entry["spec"].get("devices", [])]
    if given.gpus:
        if not output.is_for_people:
            raise InvalidConfigError(f"-o {output} prints whole slices; leave out {', '.join(given.gpus)}")
        known = {name for device in devices for name in _names(device)} | {
            name for one in maps for name in one.called
        }
        unknown = [name for name in given.gpus if name not in known]
        if unknown:
            raise InvalidConfigError(
                f"there is no GPU {unknown[0]} here; `gpu-dra-driver inspect` lists those there are"
            )
        devices = [device for device in devices if not _names(device).isdisjoint(given.gpus)]
        maps = [one for one in maps if not one.called.isdisjoint(given.gpus)]
    width = terminal_width(all_columns=output is Output.wide)
    if not output.is_for_people:
        print_objects(slices, output)
    elif not mig and devices:
        print(device_table(devices, width), end="")
    elif mig and not maps:
        print("no GPU here is in MIG mode or has MIG devices on demand (--dynamic-mig)", file=sys.stderr)
    if maps:
        from dra_driver.diagnostics.rules.mig_map import draw_gpus

        print(("" if mig else "\n") + draw_gpus(maps, width), end="")
    if not mig and not devices:
        raise NotSupportedError(
            "no device would be published: neither the PCI bus nor NVML (libnvidia-ml.so.1) shows a GPU that could be "
            "offered; `gpu-dra-driver doctor` looks for the cause"
        )


def _names(device: JsonObject) -> set[str]:
    """All names that people give a device, and for a MIG device the GPU that it is part of."""
    name, attributes = str(device["name"]), device.get("attributes", {})
    keys = ("index", "uuid", "resource.kubernetes.io/pciBusID", "parentIndex", "parentUUID")
    return {
        name,
        name.partition("-mig-")[0],
        *(value_of(attributes[key]) for key in keys if key in attributes),
    }
