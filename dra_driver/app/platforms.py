"""The machine below the daemon: real hardware, or one made of data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dra_driver.host.device_nodes import DeviceNodeReader, LstatDeviceNodeReader
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.model.host import HostPaths
from dra_driver.settings import Settings


@dataclass(frozen=True, slots=True)
class Platform:
    """The machine that the daemon runs on: where its host is seen, and how its NVML is loaded."""

    paths: HostPaths
    nodes: DeviceNodeReader
    load_nvml: Callable[[], object]


def real_platform(settings: Settings) -> Platform:
    """The node's own hardware. The library is looked up at each try, since it may be installed later."""
    from dra_driver.nvml.session import load_library

    inside = settings.container_driver_root
    root = inside if Path(inside).is_dir() else settings.nvidia_driver_root
    host = settings.host_root
    paths = HostPaths(
        driver_root=root,
        host_driver_root=settings.nvidia_driver_root,
        host_root=host if host is not None and Path(host).is_dir() else None,
        plugin_directory=str(settings.plugin_directory),
    )
    return Platform(paths, LstatDeviceNodeReader(), lambda: load_library(find_nvml_library(root)))


def simulated_platform(machine_name: str, directory: Path, plugin_directory: Path | None = None) -> Platform:
    """A machine made of data, kept in `directory`."""
    from dra_driver.simulator import create_machine, device_node_reader, nvml_library

    machine = create_machine(machine_name, directory)
    root = machine.host_root
    paths = HostPaths(
        driver_root=str(root),
        host_driver_root=str(root),
        dev_root=str(root),
        proc=str(root / "proc"),
        sys=str(root / "sys"),
        plugin_directory=None if plugin_directory is None else str(plugin_directory),
    )
    return Platform(paths, device_node_reader(machine), lambda: nvml_library(machine))


def platform_of(settings: Settings) -> Platform:
    """The platform that the settings ask for."""
    if settings.simulate is None:
        return real_platform(settings)
    directory = Path(settings.simulator_dir or DEFAULT_SIMULATOR_DIR)
    return simulated_platform(settings.simulate, directory, settings.plugin_directory)


DEFAULT_SIMULATOR_DIR = "/var/lib/gpu-dra-simulator"


def mps_host_command(settings: Settings) -> list[str]:
    """The command line of an MPS host for the same node and driver as `settings`."""
    command = [sys.executable, "-m", "dra_driver.cli.main", "mps-host"]
    command += ["--driver-name", settings.driver_name]
    command += ["--kubelet-plugins-directory-path", settings.kubelet_plugins_directory_path]
    command += ["--nvidia-driver-root", settings.nvidia_driver_root]
    command += ["--container-driver-root", settings.container_driver_root]
    command += ["--log-level", settings.log_level, "--log-format", settings.log_format]
    if settings.simulate is not None:
        command += ["--simulate", settings.simulate]
        command += ["--simulator-dir", settings.simulator_dir or DEFAULT_SIMULATOR_DIR, "--allow-plain-shm"]
    return command
