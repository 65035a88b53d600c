"""`gpu-dra-driver validate`: are claims and configurations right, and would they fit a machine?"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dra_driver.cli.inspect import Output
from dra_driver.cli.options import (
    Config,
    ContainerDriverRoot,
    DriverName,
    DynamicMig,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.cli.scratch import scratch_directory

if TYPE_CHECKING:
    from dra_driver.cli.documents import Document
    from dra_driver.cli.machinefit import MachineFit
    from dra_driver.cli.manifestcheck import Report

JsonObject = dict[str, Any]


def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="YAML files or directories; - is standard input.")
    ],
    simulate: Simulate = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print.")] = Output.table,
    driver_name: DriverName = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    simulator_dir: SimulatorDir = None,
    config: Config = None,
    consumable_shares: Annotated[
        str | None,
        typer.Option("--consumable-shares", envvar="CONSUMABLE_SHARES", help="As `run` would be given it."),
    ] = None,
    dynamic_mig: DynamicMig = None,
) -> None:
    """Check ResourceClaims, their templates, DeviceClasses, pods and configuration files.

    Claims are then tried on an empty machine: a simulated one, or this node with the configuration given by --config
    or among the files. Exit code 0: all fine, 1: faults, 2: wrong usage.
    """
    from dra_driver.cli.documents import read_documents
    from dra_driver.errors import InvalidConfigError
    from dra_driver.logs import configure_logs

    configure_logs("critical", "console")
    documents = list(read_documents(files))
    if not documents:
        raise InvalidConfigError(f"there are no documents in {', '.join(files)}")
    given = {
        "driver_name": driver_name,
        "nvidia_driver_root": nvidia_driver_root,
        "container_driver_root": container_driver_root,
        "simulate": simulate,
        "simulator_dir": None if simulator_dir is None else str(simulator_dir),
        "consumable_shares": consumable_shares,
        "dynamic_mig": dynamic_mig,
    }
    reports, machine = _reports(documents, given, config)
    _print(reports, machine, output)
    if any(report.faults for report in reports):
        raise typer.Exit(1)


def _reports(
    documents: Sequence[Document], given: Mapping[str, Any], config: Path | None
) -> tuple[list[Report], str]:
    """One report a document, and a sentence on the machine."""
    from dra_driver.cli.manifestcheck import Check, Report
    from dra_driver.settings import resolve

    reports = [Report(document.place, document.name) for document in documents]
    values: JsonObject = {}
    for document, report in zip(documents, reports, strict=True):
        values |= _configuration(document, report)
    given = {key: value for key, value in given.items() if value is not None}
    with scratch_directory("validate") as scratch:
        defaults = {
            "node_name": socket.gethostname().lower(),
            "simulator_dir": str(Path(scratch) / "machine"),
        }
        settings = resolve(values | given, config, defaults)
        machine, sentence = _machine(settings)
    check = Check(documents, settings.driver_name, machine)
    for document, report in zip(documents, reports, strict=True):
        check.document(document, report)
        report.verdict = "FAULT" if report.faults else report.verdict
    return reports, sentence


def _configuration(document: Document, report: Report) -> JsonObject:
    """The settings in a document, if it is a configuration file."""
    from dra_driver.errors import InvalidConfigError
    from dra_driver.settings import config_values

    content = document.content
    if document.problem or not isinstance(content, dict) or "kind" in content or "apiVersion" in content:
        return {}
    try:
        return config_values(content, Path(document.file))
    except InvalidConfigError as error:
        report.faults += error.faults or (str(error),)
        return {}


def _machine(settings: Any) -> tuple[MachineFit | None, str]:
    from dra_driver.app.previews import slices_to_publish
    from dra_driver.cli.machinefit import MachineFit
    from dra_driver.errors import NvmlUnavailableError

    name = settings.simulate or "this node"
    try:
        slices, _ = slices_to_publish(settings)
    except NvmlUnavailableError as error:
        if settings.simulate is not None:
            raise
        reason = str(error).partition(";")[0]
        return (
            None,
            f"not tried on a machine, since this one has no usable GPU ({reason}); name one with --simulate",
        )
    fit = MachineFit(name, settings.driver_name, slices)
    if settings.simulate is None and not fit.candidates:
        return None, "not tried on a machine, since this one has no GPU; name one with --simulate"
    return fit, f"tried on {name} as it is empty: {len(fit.candidates)} devices"


def _print(reports: Sequence[Report], machine: str, output: Output) -> None:
    bad = sum(1 for report in reports if report.faults)
    if output is not Output.table:
        document = {"machine": machine, "faulty": bad, "documents": [asdict(report) for report in reports]}
        if output is Output.json:
            typer.echo(json.dumps(document, indent=2))
        else:
            import yaml

            typer.echo(yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False), nl=False)
        return
    width = max(len(report.place) for report in reports)
    for report in reports:
        typer.echo(f"{report.verdict:<5}  {report.place:<{width}}  {report.name}")
        for label, texts in (("fault", report.faults), ("hint", report.hints), ("", report.notes)):
            for text in texts:
                typer.echo(f"         {f'{label}: ' if label else ''}{text}")
    number = len(reports)
    typer.echo(f"\n{number} document{'s' if number != 1 else ''}, {bad} with faults; {machine}")
