"""`gpu-dra-driver mps-host`."""

from __future__ import annotations

import os
import signal
import threading
from argparse import Namespace
from pathlib import Path

import structlog

from dra_driver.app.logs import SignalWatch, configure_logs, watch_signals
from dra_driver.app.settings import DEFAULT_DRIVER_NAME, DEFAULT_SIMULATOR_DIR, Flag
from dra_driver.app.settings import FLAGS as SETTINGS
from dra_driver.cli.flags import of_run
from dra_driver.host.device_nodes import DeviceNodeMaker, Mknod
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.gpu_nodes import CapabilityNodes, MigCaps
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.detachment import Detachments
from dra_driver.model.dataclass import replace
from dra_driver.model.schema import Scalar
from dra_driver.mps_host.daemon import HostTools
from dra_driver.mps_host.daemon_compute_mode import ComputeMode
from dra_driver.mps_host.daemon_control import Timings
from dra_driver.mps_host.daemon_mounts import (
    KernelMounter,
    MountsWherePossible,
    SelinuxLabels,
    has_selinux,
)
from dra_driver.mps_host.host_files import mps_layout
from dra_driver.mps_host.host_supervisor import Supervisor

_PLUGINS = "/var/lib/kubelet/plugins"
_CONTAINER_ROOT = "/driver-root"


FLAGS = (
    *of_run("driver_name"),
    replace(
        SETTINGS["kubelet_plugins_directory_path"],
        help="The kubelet's plugin data directory; the same as for `run`.",
        default=_PLUGINS,
    ),
    *of_run("nvidia_driver_root", "container_driver_root"),
    Flag(
        "allow_plain_shm",
        "Continue without a tmpfs for a daemon if mounting is not permitted. Only for tests; CUDA clients need the "
        "tmpfs.",
        Scalar(bool),
    ),
    Flag(
        "start_timeout",
        "Seconds within which a started control daemon must answer.",
        Scalar(float, least=0.1, most=600),
        env=("MPS_START_TIMEOUT",),
        default=20.0,
    ),
    Flag(
        "probe_interval",
        "Seconds between two checks of servers and clients.",
        Scalar(float, least=0.1),
        env=("MPS_PROBE_INTERVAL",),
        default=10.0,
    ),
    *of_run("simulate", "simulator_dir"),
    replace(SETTINGS["log_level"], default="info"),
    replace(SETTINGS["log_format"], default="json"),
)
EXAMPLES = ("", "--simulate dgx-h100 --simulator-dir /tmp/machine")


def mps_host(given: Namespace) -> None:
    """Run one nvidia-cuda-mps-control for each GPU, MIG device or group of GPUs with MPS, until it receives SIGTERM.

    `run` lists the daemons that it needs in PLUGINS/DRIVER/mps/host.wanted, which only root can open. Each daemon has
    its own session: it continues when this process stops, and the next mps-host adopts it. In a container the daemons
    stop with the container, so the pods of the DaemonSet are replaced only when you delete them. Needs root; in a pod
    also hostPID, privileged, and bidirectional mount propagation on the plugins directory.
    """
    logs = configure_logs(given.log_level, given.log_format)
    logs.log_crashes()
    watch = watch_signals(logs)
    os.umask(0o022)
    plugins = Path(given.kubelet_plugins_directory_path)
    layout = mps_layout(plugins.absolute() / (given.driver_name or DEFAULT_DRIVER_NAME))
    if given.simulate is None:
        root = _driver_root(given.nvidia_driver_root, given.container_driver_root)
        # CUDA in this container opens device nodes in the container's /dev, wherever the NVIDIA driver is
        # installed.
        nodes = CapabilityNodes(MigCaps(), "/", Mknod())
        boot = Sysfs()
    else:
        root, maker = _simulated_root(given.simulate, given.simulator_dir)
        nodes = CapabilityNodes(MigCaps(f"{root}/proc"), root, maker)
        boot = Sysfs(proc=f"{root}/proc")
    programs = InstalledPrograms(root, layout.libraries, 0o755)
    detachments = Detachments(layout.root.parent, boot.this_boot())
    labels = SelinuxLabels(enabled=has_selinux())
    mounter = MountsWherePossible if given.allow_plain_shm else KernelMounter
    tools = HostTools(
        layout,
        programs,
        mounter(layout.root, labels),
        ComputeMode(programs, detachments.using_nvml, layout.modes),
        nodes.make_missing,
        labels,
        Timings(start=given.start_timeout, probe=given.probe_interval),
    )
    _serve(tools, watch)


def _serve(tools: HostTools, watch: SignalWatch) -> None:
    log = structlog.get_logger(__name__)
    stopped = threading.Event()
    watch.on(stopped.set, signal.SIGTERM, signal.SIGINT)
    supervisor = Supervisor(tools)
    supervisor.open()
    try:
        log.info(
            "mps_host_started",
            directory=str(tools.layout.root),
            daemons=len(supervisor.status()),
            pid=os.getpid(),
        )
        stopped.wait()
    finally:
        supervisor.close()
        log.info("mps_host_stopped", daemons_left=len(supervisor.status()))


def _driver_root(host: str | None, inside: str | None) -> str:
    container, root = inside or _CONTAINER_ROOT, host or "/"
    return root if Path(root).is_dir() and not Path(container).is_dir() else container


def _simulated_root(name: str, directory: str | None) -> tuple[str, DeviceNodeMaker]:
    from dra_driver.simulator import SimulatedDeviceNodes, create_machine

    machine = create_machine(name, Path(directory or DEFAULT_SIMULATOR_DIR))
    return str(machine.host_root), SimulatedDeviceNodes(machine.host_root)
