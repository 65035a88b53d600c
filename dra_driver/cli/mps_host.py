"""`gpu-dra-driver mps-host`: supervises the MPS control daemons of a node."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dra_driver.cli.options import ContainerDriverRoot, DriverName, NvidiaDriverRoot, Simulate, SimulatorDir

if TYPE_CHECKING:
    from dra_driver.app.posix_signals import SignalWatch
    from dra_driver.host.capability_nodes import CapabilityNodes
    from dra_driver.host.device_nodes import DeviceNodeMaker
    from dra_driver.host.driver_programs import InstalledPrograms
    from dra_driver.mps.daemon_conversation import Timings
    from dra_driver.mps.layout import MpsLayout

_DRIVER_NAME = "gpu.nvidia.com"
_PLUGINS = "/var/lib/kubelet/plugins"
_CONTAINER_ROOT = "/driver-root"
_SIMULATOR_DIR = "/var/lib/gpu-dra-simulator"


def mps_host(
    driver_name: DriverName = None,
    kubelet_plugins_directory_path: Annotated[
        str,
        typer.Option(
            "--kubelet-plugins-directory-path",
            envvar="KUBELET_PLUGINS_DIRECTORY_PATH",
            help="The kubelet's plugin data directory; the same as of `run`.",
        ),
    ] = _PLUGINS,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    allow_plain_shm: Annotated[
        bool,
        typer.Option(
            "--allow-plain-shm",
            envvar="ALLOW_PLAIN_SHM",
            help="Do without a tmpfs a daemon where mounting is not permitted. For tests; CUDA clients need one.",
        ),
    ] = False,
    start_timeout: Annotated[
        float,
        typer.Option(
            "--start-timeout",
            envvar="MPS_START_TIMEOUT",
            min=0.1,
            max=600,
            help="Seconds in which a control daemon must answer.",
        ),
    ] = 10.0,
    probe_interval: Annotated[
        float,
        typer.Option(
            "--probe-interval",
            envvar="MPS_PROBE_INTERVAL",
            min=0.1,
            help="Seconds between two looks at servers and clients.",
        ),
    ] = 10.0,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
    log_level: Annotated[
        str, typer.Option("--log-level", envvar="LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
    log_format: Annotated[
        str, typer.Option("--log-format", envvar="LOG_FORMAT", help="json or console.")
    ] = "json",
) -> None:
    """Start and supervise one nvidia-cuda-mps-control for each shared GPU or MIG device, until SIGTERM.

    `run` asks for daemons over PLUGINS/DRIVER/mps/host.sock, which only root can open. Daemons are started in
    sessions of their own: they run on when this process ends, and its successor takes them over. In a
    container they end with the container, so its DaemonSet is updated on delete only. Needs root; in a pod
    also hostPID, privileged, and bidirectional mount propagation on the plugins directory.
    """
    from dra_driver.app.posix_signals import watch_signals
    from dra_driver.host.capability_nodes import CapabilityNodes
    from dra_driver.host.device_nodes import Mknod
    from dra_driver.host.driver_programs import installed_programs
    from dra_driver.host.mig_caps import MigCaps
    from dra_driver.logs import configure_logs
    from dra_driver.mps.daemon_conversation import Timings
    from dra_driver.mps.layout import mps_layout

    logs = configure_logs(log_level, log_format)
    logs.take_crashes()
    watch = watch_signals(logs)
    os.umask(0o022)
    layout = mps_layout(Path(kubelet_plugins_directory_path).absolute() / (driver_name or _DRIVER_NAME))
    if simulate is None:
        root = _driver_root(nvidia_driver_root, container_driver_root)
        # CUDA in this container opens the nodes of this container's /dev, wherever the driver is installed.
        nodes = CapabilityNodes(MigCaps(), "/", Mknod())
    else:
        root, maker = _simulated_root(simulate, simulator_dir)
        nodes = CapabilityNodes(MigCaps(f"{root}/proc"), root, maker)
    programs = installed_programs(root, layout.libraries, 0o755)
    _serve(
        layout,
        programs,
        nodes,
        Timings(start=start_timeout, probe=probe_interval),
        watch,
        allow_plain_shm=allow_plain_shm,
    )


def _serve(
    layout: MpsLayout,
    programs: InstalledPrograms,
    nodes: CapabilityNodes,
    timings: Timings,
    watch: SignalWatch,
    *,
    allow_plain_shm: bool,
) -> None:
    import structlog

    from dra_driver.mps.compute_mode import ComputeMode
    from dra_driver.mps.daemon_control import ControlProgram
    from dra_driver.mps.mounts import KernelMounter, MountsWherePossible
    from dra_driver.mps.selinux import SelinuxLabels, has_selinux
    from dra_driver.mps.server import Server
    from dra_driver.mps.supervisor import HostTools, Supervisor

    log = structlog.get_logger(__name__)
    stopped = threading.Event()
    watch.on(stopped.set, signal.SIGTERM, signal.SIGINT)
    labels = SelinuxLabels(enabled=has_selinux())
    kernel = KernelMounter(layout.root, labels)
    tools = HostTools(
        ControlProgram(programs),
        MountsWherePossible(kernel) if allow_plain_shm else kernel,
        ComputeMode(programs),
        nodes.make_missing,
        labels,
    )
    supervisor = Supervisor(layout, tools, timings)
    supervisor.open()
    server = Server(layout.socket, supervisor)
    try:
        server.start()
        log.info(
            "mps_host_started",
            socket=str(layout.socket),
            daemons=len(supervisor.status()),
            pid=os.getpid(),
        )
        stopped.wait()
    finally:
        supervisor.begin_closing()
        server.stop()
        supervisor.close()
        log.info("mps_host_stopped", daemons_left=len(supervisor.status()))


def _driver_root(host: str | None, inside: str | None) -> str:
    """As this process sees it: the container's view where there is one."""
    container = inside or _CONTAINER_ROOT
    return container if Path(container).is_dir() else host or "/"


def _simulated_root(name: str, directory: Path | None) -> tuple[str, DeviceNodeMaker]:
    """The host root of the machine, and who makes its nodes; made by whoever comes first, this process or `run`."""
    from dra_driver.simulator import create_machine, device_node_reader

    machine = create_machine(name, directory or Path(_SIMULATOR_DIR))
    return str(machine.host_root), device_node_reader(machine)
