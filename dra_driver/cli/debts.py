"""`gpu-dra-driver debts`: what claims that have ended still owe to this node, and another try to pay it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from dra_driver.cli.flags import of_run, switch
from dra_driver.cli.output import OUTPUT, Output, print_object
from dra_driver.cli.tables import terminal_width
from dra_driver.diagnostics.rules.tables import hanging

FLAGS = (
    switch("pay", "Try to pay everything now; as root on the node."),
    OUTPUT,
    *of_run("driver_name", "kubelet_plugins_directory_path", "cdi_root", "config", "nvidia_driver_root"),
    *of_run("container_driver_root", "simulate", "simulator_dir"),
)


def debts(given: Namespace) -> int:
    """A debt is what could not be undone when the claim ended. The driver pays by itself as soon as it can. `--pay`
    tries at once, also while no driver runs.
    Exit code 0: nothing is owed, 1: something is left.
    """
    from dra_driver.app.commands.node import node_debts
    from dra_driver.diagnostics.rules.prepared_claims import owed
    from dra_driver.logs import configure_logs
    from dra_driver.settings import resolve

    configure_logs("critical", "console")
    settings = resolve(vars(given), given.config, {"node_name": "this-node"})
    left, problems = node_debts(settings, pay=given.pay)
    if given.output.is_for_people:
        width = terminal_width(all_columns=given.output is Output.wide)
        lines = [hanging("", debt.text, width) for debt in left] or ["nothing is owed"]
        print("\n".join([*lines, *(hanging("problem: ", problem, width) for problem in problems)]))
    else:
        print_object(
            {"debts": [asdict(owed(debt)) for debt in left], "problems": list(problems)}, given.output
        )
    return 1 if left or problems else 0
