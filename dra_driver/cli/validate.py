"""`gpu-dra-driver validate`: are claims and configurations right, and would they fit a machine?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dra_driver.cli.options import (
    Config,
    ConsumableShares,
    ContainerDriverRoot,
    DriverName,
    DynamicMig,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.cli.output import Output, OutputOption, print_object
from dra_driver.cli.scratch import scratch_settings

if TYPE_CHECKING:
    from dra_driver.validation.documents import Document
    from dra_driver.validation.manifest_check import DocumentReport


def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="YAML files or directories; - is standard input.")
    ],
    simulate: Simulate = None,
    output: OutputOption = Output.table,
    driver_name: DriverName = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    simulator_dir: SimulatorDir = None,
    config: Config = None,
    consumable_shares: ConsumableShares = None,
    dynamic_mig: DynamicMig = None,
) -> None:
    """Check manifests and configuration files.

    ResourceClaims, their templates, DeviceClasses, pods and the driver's own configuration. Claims are then tried on
    an empty machine: a simulated one, or this node with the configuration given by --config or among the files. Exit
    code 0: all fine, 1: faults, 2: wrong usage.
    """
    given = dict(locals())
    from dra_driver.errors import InvalidConfigError
    from dra_driver.logs import configure_logs
    from dra_driver.validation.documents import read_documents

    configure_logs("critical", "console")
    documents = list(read_documents(files))
    if not documents:
        raise InvalidConfigError(f"there are no documents in {', '.join(files)}")
    reports, machine = _reports(documents, given, config)
    _print(reports, machine, output)
    if any(report.faults for report in reports):
        raise typer.Exit(1)


def _reports(
    documents: Sequence[Document], given: Mapping[str, Any], config: Path | None
) -> tuple[list[DocumentReport], str]:
    """One report a document, and a sentence on the machine."""
    from dra_driver.app.offline import configured_among, machine_to_try
    from dra_driver.validation.manifest_check import check_documents

    configured, faults = configured_among(documents)
    stated = {name: value for name, value in given.items() if value is not None}
    with scratch_settings("validate", configured | stated, config) as settings:
        machine, sentence = machine_to_try(settings)
    return check_documents(documents, settings.driver_name, machine, faults), sentence


def _print(reports: Sequence[DocumentReport], machine: str, output: Output) -> None:
    bad = sum(1 for report in reports if report.faults)
    if not output.is_for_people:
        checked = [asdict(report) for report in reports]
        print_object({"machine": machine, "faulty": bad, "documents": checked}, output)
        return
    width = max(len(report.place) for report in reports)
    verdicts = max(5, *(len(report.verdict) for report in reports))
    for report in reports:
        typer.echo(f"{report.verdict:<{verdicts}}  {report.place:<{width}}  {report.name}")
        for label, texts in (("fault", report.faults), ("hint", report.hints), ("", report.notes)):
            for text in texts:
                typer.echo(f"         {f'{label}: ' if label else ''}{text}")
    number = len(reports)
    open_ones = sum(1 for report in reports if report.verdict == "not judged")
    unjudged = f", {open_ones} not judged" if open_ones else ""
    typer.echo(f"\n{number} document{'s' if number != 1 else ''}, {bad} with faults{unjudged}; {machine}")
