"""The machine below the daemon: real hardware, or one made of data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.errors import NvmlUnavailableError
from dra_driver.host.device_nodes import DeviceNodeReader, LstatDeviceNodeReader
from dra_driver.host.driver_root import find_nvidia_smi, find_nvml_library
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import HostPaths
from dra_driver.model.mig import GpuInstance
from dra_driver.model.pulse import Pulse
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
    )
    return Platform(paths, LstatDeviceNodeReader(), lambda: load_library(find_nvml_library(root)))


def simulated_platform(machine_name: str, directory: Path) -> Platform:
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
    )
    return Platform(paths, device_node_reader(machine), lambda: nvml_library(machine))


def platform_of(settings: Settings) -> Platform:
    """The platform that the settings ask for."""
    if settings.simulate is None:
        return real_platform(settings)
    return simulated_platform(settings.simulate, Path(settings.simulator_dir or DEFAULT_SIMULATOR_DIR))


DEFAULT_SIMULATOR_DIR = "/var/lib/gpu-dra-simulator"


def smi_and_library(driver_root: str) -> tuple[str, str] | None:
    """The paths of nvidia-smi and of the NVML library below a driver root; None where one is missing."""
    program = find_nvidia_smi(driver_root)
    try:
        library = find_nvml_library(driver_root)
    except NvmlUnavailableError:
        return None
    return None if program is None else (program, library)


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


class NvmlReader:
    """The NVML session as discovery uses it; the binding is imported with the first use.

    `on_demand` selects the GPUs on which MIG devices are made on demand, where they can be; None selects none.
    `sort_out` leaves of the instances on one of those what is not of our making, which is all that is read in detail.
    """

    def __init__(
        self,
        loader: Callable[[], object],
        on_demand: Callable[[Gpu], bool] | None = None,
        sort_out: Callable[[str, Sequence[GpuInstance]], Sequence[GpuInstance]] | None = None,
    ) -> None:
        from dra_driver.nvml.session import NvmlSession

        self._session = NvmlSession(loader)
        self._on_demand = on_demand
        self._sort_out = sort_out
        self._memory: Any = None

    def reopen(self) -> None:
        """Initialise anew. Raises: NvmlInUseError while a change of a GPU is under way."""
        self._session.reopen()
        if self._memory is not None:
            self._memory.reopened()

    def operation(self, patience: Callable[[], float]) -> AbstractContextManager[None]:
        """As NvmlSession.operation."""
        return self._session.operation(patience)

    def close(self) -> None:
        """Shut down."""
        self._session.close()

    def read_inventory(self) -> Any:
        """All GPUs that NVML shows."""
        from dra_driver.nvml.discovery import ScanMemory, everything, never, read_inventory

        if self._memory is None:
            self._memory = ScanMemory()
        return read_inventory(self._on_demand or never, self._memory, self._sort_out or everything)

    def read_what_exists(self, gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        """MIG mode and GPU instances of a partitioned GPU."""
        from dra_driver.nvml.partitions import read_what_exists

        return read_what_exists(gpu)

    def processes(self, uuid: str) -> Mapping[int, str]:
        """As `read_processes`; NvmlUnavailableError too while NVML is not initialised."""
        from dra_driver.nvml.processes import read_processes

        with self._session.kept_open():
            return read_processes(uuid)

    def health_source(self) -> Any:
        """Events and signals of health, through the same session."""
        from dra_driver.nvml.events import HealthSource

        return HealthSource(self._session)

    def pulse(self) -> Pulse:
        """A cheap value that differs when a GPU was lost or changed its MIG mode."""
        from dra_driver.nvml.discovery import read_pulse

        return read_pulse()
