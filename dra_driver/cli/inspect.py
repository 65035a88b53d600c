"""`gpu-dra-driver inspect`: the slices that this machine would publish, without a cluster."""

from __future__ import annotations

import json
import socket
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dra_driver.cli.options import (
    Config,
    ContainerDriverRoot,
    DriverName,
    NodeName,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)


class Output(StrEnum):
    """Forms of output."""

    table = "table"
    json = "json"
    yaml = "yaml"


def inspect(
    simulate: Simulate = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print.")] = Output.table,
    node_name: NodeName = None,
    driver_name: DriverName = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    simulator_dir: SimulatorDir = None,
    config: Config = None,
) -> None:
    """Print the ResourceSlices that `run` would publish on this machine; no cluster is needed.

    -o json and -o yaml print the very objects; the table shows the devices. What could not be read is told
    on standard error.
    """
    from dra_driver.app import slices_to_publish
    from dra_driver.logs import configure_logs
    from dra_driver.settings import resolve

    configure_logs("error", "console")
    with tempfile.TemporaryDirectory(prefix="gpu-dra-inspect-") as scratch:
        settings = resolve(
            {
                "node_name": node_name,
                "driver_name": driver_name,
                "nvidia_driver_root": nvidia_driver_root,
                "container_driver_root": container_driver_root,
                "simulate": simulate,
                "simulator_dir": None if simulator_dir is None else str(simulator_dir),
            },
            config,
            {"node_name": socket.gethostname().lower(), "simulator_dir": str(Path(scratch) / "machine")},
        )
        slices, notes = slices_to_publish(settings)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    _print(slices, output)


def _print(slices: list[dict[str, Any]], output: Output) -> None:
    if output is Output.json:
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": slices}, indent=2))
    elif output is Output.yaml:
        import yaml

        typer.echo(yaml.safe_dump_all(slices, sort_keys=False, default_flow_style=False), nl=False)
    else:
        from dra_driver.cli.tables import device_table

        typer.echo(
            device_table([device for entry in slices for device in entry["spec"].get("devices", [])]),
            nl=False,
        )
