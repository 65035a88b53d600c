"""Flags that several commands for people share, as typer's options. The daemons read the same ones in `flags`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dra_driver.cli import flags


def _option(flag: flags.Flag) -> Any:
    (first, *more) = flag.spellings
    spelled = f"{first}/--no-{first.removeprefix('--')}" if flag.kind is bool else first
    return typer.Option(
        spelled, *more, envvar=list(flag.variables), help=flag.help, metavar=flag.metavar, hidden=flag.hidden
    )


DriverName = Annotated[str | None, _option(flags.DRIVER_NAME)]
NodeName = Annotated[str | None, _option(flags.NODE_NAME)]
NvidiaDriverRoot = Annotated[str | None, _option(flags.NVIDIA_DRIVER_ROOT)]
ContainerDriverRoot = Annotated[str | None, _option(flags.CONTAINER_DRIVER_ROOT)]
Config = Annotated[Path | None, _option(flags.CONFIG)]
Simulate = Annotated[str | None, _option(flags.SIMULATE)]
SimulateSeveral = Annotated[
    list[str] | None,
    typer.Option(
        "--simulate",
        envvar=list(flags.SIMULATE.variables),
        metavar="MACHINE",
        help="A simulated machine instead of this one; repeat it for several machines.",
    ),
]
SimulatorDir = Annotated[Path | None, _option(flags.SIMULATOR_DIR)]
DynamicMig = Annotated[bool | None, _option(flags.DYNAMIC_MIG)]
ImexChannel = Annotated[str | None, _option(flags.IMEX_CHANNEL)]
HostDevices = Annotated[str | None, _option(flags.HOST_DEVICES)]
CdiRoot = Annotated[str | None, _option(flags.CDI_ROOT)]
KubeletRegistrarDirectory = Annotated[str | None, _option(flags.KUBELET_REGISTRAR_DIRECTORY)]
KubeletPluginsDirectory = Annotated[str | None, _option(flags.KUBELET_PLUGINS_DIRECTORY)]
Kubeconfig = Annotated[str | None, _option(flags.KUBECONFIG)]
HostRoot = Annotated[str | None, _option(flags.HOST_ROOT)]
CdiHookPath = Annotated[str | None, _option(flags.CDI_HOOK_PATH)]
ClusterKubeconfig = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig", help="[default: that of KUBECONFIG, ~/.kube/config, in a pod its service account]"
    ),
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
ConsumableShares = Annotated[
    str | None,
    typer.Option("--consumable-shares", envvar="CONSUMABLE_SHARES", help="As `run` would be given it."),
]


def usual_kubeconfig() -> str | None:
    """Where kubectl looks; None in a pod."""
    if named := os.environ.get("KUBECONFIG", "").strip(os.pathsep):
        return named
    usual = Path("~/.kube/config").expanduser()
    return str(usual) if usual.exists() else None
