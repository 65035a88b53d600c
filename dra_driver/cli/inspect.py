"""`gpu-dra-driver inspect`: the slices that this machine would publish, without a cluster."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dra_driver.cli.options import (
    Config,
    ConsumableShares,
    ContainerDriverRoot,
    DriverName,
    DynamicMig,
    ImexChannel,
    NodeName,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.cli.output import Output, OutputOption, print_objects
from dra_driver.cli.scratch import scratch_settings
from dra_driver.cli.tables import device_table, terminal_width

if TYPE_CHECKING:
    from dra_driver.diagnostics.rules.mig_map import GpuMap

JsonObject = dict[str, Any]

_WAIT_S = 60.0
"""Without another client NVML wakes every GPU first, which takes seconds each."""


def inspect(
    simulate: Simulate = None,
    output: OutputOption = Output.table,
    node_name: NodeName = None,
    driver_name: DriverName = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    simulator_dir: SimulatorDir = None,
    config: Config = None,
    dynamic_mig: DynamicMig = None,
    consumable_shares: ConsumableShares = None,
    imex_channel: ImexChannel = None,
    kubelet_plugins_directory_path: Annotated[
        str | None,
        typer.Option(
            "--kubelet-plugins-directory-path",
            envvar="KUBELET_PLUGINS_DIRECTORY_PATH",
            help="Where the driver keeps records and health. [default: /var/lib/kubelet/plugins]",
        ),
    ] = None,
    mig: Annotated[
        bool, typer.Option("--mig", help="Print only the drawing of the GPUs that are cut into MIG devices.")
    ] = False,
) -> None:
    """Print the slices that `run` would publish here.

    No cluster is needed. -o json and -o yaml print the very objects; the table shows the devices, and below it the
    memory slices of each GPU in MIG mode or with MIG devices on demand: what is there, who holds it, and what there
    is room for. Nothing is changed, on the GPUs or in the driver's directories. What could not be read is told on
    standard error.
    """
    given = dict(locals())
    from dra_driver.app.offline import mig_maps, slices_to_publish
    from dra_driver.concurrency.bounded_call import bounded
    from dra_driver.errors import InvalidConfigError, NotSupportedError, NvmlUnavailableError
    from dra_driver.logs import configure_logs

    if mig and not output.is_for_people:
        raise InvalidConfigError(f"--mig prints a drawing for people; leave out -o {output}, or --mig")
    configure_logs("error", "console")
    # A machine that is simulated just for this command has no past.
    is_empty = simulate is not None and simulator_dir is None
    with scratch_settings("inspect", given, config) as settings:

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
        typer.echo(f"note: {note}", err=True)
    devices = [device for entry in slices for device in entry["spec"].get("devices", [])]
    width = terminal_width(all_columns=output is Output.wide)
    if not output.is_for_people:
        print_objects(slices, output)
    elif not mig and devices:
        typer.echo(device_table(devices, width), nl=False)
    elif mig and not maps:
        typer.echo("no GPU here is in MIG mode or has MIG devices on demand (--dynamic-mig)", err=True)
    if maps:
        from dra_driver.diagnostics.rules.mig_map import draw_gpus

        typer.echo(("" if mig else "\n") + draw_gpus(maps, width), nl=False)
    if not mig and not devices:
        raise NotSupportedError(
            "no device would be published: neither the PCI bus nor NVML (libnvidia-ml.so.1) shows a GPU that could be "
            "offered; `gpu-dra-driver doctor` looks for the cause"
        )
