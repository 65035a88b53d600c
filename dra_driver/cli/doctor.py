"""`gpu-dra-driver doctor`: is everything there that the plugin needs on this node, is every GPU well, and if not, what
to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from dra_driver.cli.options import (
    CdiHookPath,
    CdiRoot,
    Config,
    ContainerDriverRoot,
    DriverName,
    DynamicMig,
    HostDevices,
    HostRoot,
    ImexChannel,
    Kubeconfig,
    KubeletPluginsDirectory,
    KubeletRegistrarDirectory,
    NodeName,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.cli.output import Color, ColorOption, Output, OutputOption, print_object
from dra_driver.cli.scratch import this_machine
from dra_driver.cli.tables import terminal_width
from dra_driver.diagnostics.rules.tables import hanging

if TYPE_CHECKING:
    from dra_driver.diagnostics.doctor.checks import Outcome


_COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "bright_red", "SKIP": "bright_black"}


def doctor(
    output: OutputOption = Output.table,
    color: ColorOption = Color.auto,
    node_name: NodeName = None,
    driver_name: DriverName = None,
    config: Config = None,
    cdi_root: CdiRoot = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    host_root: HostRoot = None,
    nvidia_cdi_hook_path: CdiHookPath = None,
    kubelet_registrar_directory_path: KubeletRegistrarDirectory = None,
    kubelet_plugins_directory_path: KubeletPluginsDirectory = None,
    kubeconfig: Kubeconfig = None,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
    dynamic_mig: DynamicMig = None,
    imex_channel: ImexChannel = None,
    host_devices: HostDevices = None,
) -> None:
    """Check what the driver needs, and say what to do.

    Host, health of the GPUs, runtime, kubelet and cluster. Changes nothing. Run it in the driver's pod (`kubectl
    exec`), where it has the settings of the driver, or on the node with the options of `run`. Exit code 0: all in order
    or only warnings, 1: something fails.
    """
    given = dict(locals())
    from dra_driver.app.offline import doctor_checks
    from dra_driver.diagnostics.doctor.checks import run_checks
    from dra_driver.logs import configure_logs
    from dra_driver.settings import resolve

    configure_logs("critical", "console")
    outcomes = run_checks(doctor_checks(resolve(given, config, {"node_name": this_machine()})))
    _print(outcomes, output, is_coloured=color.is_on())
    if any(outcome.finding.status == "FAIL" for outcome in outcomes):
        raise typer.Exit(1)


def _print(outcomes: Sequence[Outcome], output: Output, *, is_coloured: bool) -> None:
    from dra_driver.diagnostics.doctor.checks import folded

    found = Counter(outcome.finding.status for outcome in outcomes)
    counts = {status: found[status] for status in ("OK", "WARN", "FAIL", "SKIP")}
    if not output.is_for_people:
        checks = [{"check": outcome.check, **asdict(outcome.finding)} for outcome in outcomes]
        print_object({"counts": counts, "checks": checks}, output)
        return
    outcomes = folded(outcomes)
    names = max(len(outcome.check) for outcome in outcomes)
    width = terminal_width(all_columns=output is Output.wide)
    for outcome in outcomes:
        finding = outcome.finding
        status = f"{finding.status:<4}"
        line = hanging(f"{status}  {outcome.check:<{names}}  ", finding.seen, width)
        if is_coloured:
            line = typer.style(status, fg=_COLORS[finding.status]) + line[len(status) :]
        typer.echo(line, color=is_coloured)
        if finding.remedy is not None:
            typer.echo(hanging(f"      {'':<{names}}  -> ", finding.remedy, width))
    typer.echo("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
