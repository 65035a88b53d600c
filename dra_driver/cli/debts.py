"""`gpu-dra-driver debts`: what claims that have ended still owe to this node, and another try to pay it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from dra_driver.cli.options import (
    CdiRoot,
    Config,
    ContainerDriverRoot,
    DriverName,
    KubeletPluginsDirectory,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.cli.output import Output, OutputOption, print_object
from dra_driver.cli.tables import terminal_width
from dra_driver.diagnostics.rules.tables import hanging


def debts(
    pay: bool = typer.Option(False, "--pay", help="Try to pay everything now; as root on the node."),
    output: OutputOption = Output.table,
    driver_name: DriverName = None,
    kubelet_plugins_directory_path: KubeletPluginsDirectory = None,
    cdi_root: CdiRoot = None,
    config: Config = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
) -> None:
    """Print what ended claims still owe to this node.

    A debt is what could not be undone when the claim ended. The driver pays by itself as soon as it can. `--pay`
    tries at once, also while no driver runs.
    Exit code 0: nothing is owed, 1: something is left.
    """
    given = dict(locals())
    del given["pay"]
    from dra_driver.app.offline import node_debts
    from dra_driver.diagnostics.rules.prepared_claims import owed
    from dra_driver.logs import configure_logs
    from dra_driver.settings import resolve

    configure_logs("critical", "console")
    settings = resolve(given, config, {"node_name": "this-node"})
    left, problems = node_debts(settings, pay=pay)
    if output.is_for_people:
        width = terminal_width(all_columns=output is Output.wide)
        lines = [hanging("", debt.text, width) for debt in left] or ["nothing is owed"]
        typer.echo("\n".join([*lines, *(hanging("problem: ", problem, width) for problem in problems)]))
    else:
        print_object({"debts": [asdict(owed(debt)) for debt in left], "problems": list(problems)}, output)
    if left or problems:
        raise typer.Exit(1)
