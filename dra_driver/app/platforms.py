"""The machine on which the daemon runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dra_driver.app.settings import DEFAULT_SIMULATOR_DIR, Settings
from dra_driver.host.device_nodes import DeviceNodeReader, LstatDeviceNodeReader
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.vfio import HostPciControl, PciControl
from dra_driver.model.dataclass import dataclass
from dra_driver.model.host import HostPaths


@dataclass(frozen=True, slots=True)
class Platform:
    paths: HostPaths
    nodes: DeviceNodeReader
    load_nvml: Callable[[], object]
    pci: PciControl


def real_platform(settings: Settings) -> Platform:
    """Search for NVML's library at each attempt to load it, because it may come later."""
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
    control = HostPciControl(paths.host_root or root)
    return Platform(paths, LstatDeviceNodeReader(), lambda: load_library(find_nvml_library(root)), control)


def simulated_platform(machine_name: str, directory: Path, plugin_directory: Path) -> Platform:
    from dra_driver.simulator import (
        SimulatedDeviceNodes,
        SimulatedLibrary,
        SimulatedPciControl,
        create_machine,
    )

    machine = create_machine(machine_name, directory)
    root = machine.host_root
    paths = HostPaths(
        driver_root=str(root),
        host_driver_root=str(root),
        dev_root=str(root),
        proc=str(root / "proc"),
        sys=str(root / "sys"),
        plugin_directory=str(plugin_directory),
    )
    control = SimulatedPciControl(machine)
    return Platform(
        paths, SimulatedDeviceNodes(machine.host_root), lambda: SimulatedLibrary(machine), control
    )


def platform_of(settings: Settings) -> Platform:
    if settings.simulate is None:
        return real_platform(settings)
    directory = Path(settings.simulator_dir or DEFAULT_SIMULATOR_DIR)
    return simulated_platform(settings.simulate, directory, settings.plugin_directory)
