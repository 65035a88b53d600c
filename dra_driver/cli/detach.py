"""`gpu-dra-driver detach`: have this node's driver let go of NVML for a while."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from dra_driver.cli.options import (
    Config,
    ContainerDriverRoot,
    DriverName,
    KubeletPluginsDirectory,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.errors import InvalidConfigError

_DURATION = re.compile(r"([0-9]{1,5})([smh])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_LEAST_S, _MOST_S = 10, 24 * 3600


def detach(
    gpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GPU",
            help="The GPUs to be changed: device name, UUID, index or PCI bus ID. Claims on others do not count. "
            "[default: all]",
        ),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="How long, such as 90s, 5m or 2h; 10s to 24h. [default: 5m]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also while claims use the GPUs.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Have NVML opened again now.")] = False,
    driver_name: DriverName = None,
    kubelet_plugins_directory_path: KubeletPluginsDirectory = None,
    config: Config = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
) -> None:
    """Have the driver let go of NVML for some minutes.

    Then GPUs can be reset, MIG modes switched and the NVIDIA driver unloaded. Returns when every instance of the
    driver on this node has let go. No device is offered until the time is over; then the driver opens NVML again and
    sets time slices and compute modes again. Refused while claims use the GPUs. As root on the node, or with kubectl
    exec in the driver's pod.
    """
    given = dict(locals())
    for name in ("gpus", "duration", "force", "end"):
        del given[name]
    from dra_driver.app.offline import attach_node, detach_node
    from dra_driver.logs import configure_logs
    from dra_driver.settings import resolve

    configure_logs("critical", "console")
    if end and (gpus or force or duration is not None):
        raise InvalidConfigError("--end ends all of it: leave out GPUs, --for and --force")
    seconds = _seconds("5m" if duration is None else duration)
    settings = resolve(given, config, {"node_name": "this-node"})
    typer.echo(attach_node(settings) if end else detach_node(settings, seconds, gpus or [], force=force))


def _seconds(duration: str) -> int:
    match = _DURATION.match(duration)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise InvalidConfigError(f"--for {duration}: give a time from 10s to 24h, such as 90s, 5m or 2h")
    return seconds
