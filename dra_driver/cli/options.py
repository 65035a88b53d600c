"""Options that several commands share, under the names that NVIDIA's own driver uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DriverName = Annotated[
    str | None,
    typer.Option("--driver-name", envvar="DRIVER_NAME", help="DRA driver name. [default: gpu.nvidia.com]"),
]
NodeName = Annotated[
    str | None,
    typer.Option("--node-name", envvar="NODE_NAME", help="Name of this node; also the pool's name."),
]
NvidiaDriverRoot = Annotated[
    str | None,
    typer.Option(
        "--nvidia-driver-root",
        "--host_driver-root",
        envvar=["NVIDIA_DRIVER_ROOT", "HOST_DRIVER_ROOT"],
        help="Driver root on the host. [default: /]",
    ),
]
ContainerDriverRoot = Annotated[
    str | None,
    typer.Option(
        "--container-driver-root",
        envvar="DRIVER_ROOT_CTR_PATH",
        help="Driver root as this process sees it, if that directory exists. [default: /driver-root]",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="CONFIG_FILE", help="YAML file with settings; flags and environment win."
    ),
]
Simulate = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        envvar="SIMULATE",
        metavar="MACHINE",
        help="Run on a simulated machine: a name from `gpu-dra-driver simulate list`, or a YAML file.",
    ),
]
SimulatorDir = Annotated[
    Path | None,
    typer.Option(
        "--simulator-dir", envvar="SIMULATOR_DIR", help="Where the simulated machine keeps its state."
    ),
]
DynamicMig = Annotated[
    bool | None,
    typer.Option(
        "--dynamic-mig/--no-dynamic-mig",
        envvar="DYNAMIC_MIG",
        help="Make MIG devices on demand, on every GPU that is capable of it. [default: off]",
    ),
]
CdiRoot = Annotated[
    str | None,
    typer.Option("--cdi-root", envvar="CDI_ROOT", help="Directory for CDI specs. [default: /etc/cdi]"),
]
KubeletRegistrarDirectory = Annotated[
    str | None,
    typer.Option(
        "--kubelet-registrar-directory-path",
        envvar="KUBELET_REGISTRAR_DIRECTORY_PATH",
        help="The kubelet's plugin registry. [default: /var/lib/kubelet/plugins_registry]",
    ),
]
KubeletPluginsDirectory = Annotated[
    str | None,
    typer.Option(
        "--kubelet-plugins-directory-path",
        envvar="KUBELET_PLUGINS_DIRECTORY_PATH",
        help="The kubelet's plugin data directory. [default: /var/lib/kubelet/plugins]",
    ),
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", envvar="KUBECONFIG", help="[default: in-cluster]")
]
HostRoot = Annotated[
    str | None,
    typer.Option(
        "--host-root",
        envvar="HOST_ROOT",
        help="The host's / as this process sees it, if it is mounted; nvidia-cdi-hook is looked for there.",
    ),
]
CdiHookPath = Annotated[
    str | None,
    typer.Option(
        "--nvidia-cdi-hook-path",
        envvar="NVIDIA_CDI_HOOK_PATH",
        help="nvidia-cdi-hook on the host. [default: looked for on the host, in our own directory, in the driver root]",
    ),
]
