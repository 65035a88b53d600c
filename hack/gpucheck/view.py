"""The machine as the daemon would see it, with an NVML that cannot change anything."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dra_driver.errors import DraDriverError
from dra_driver.host.device_nodes import DeviceNodeReader, LstatDeviceNodeReader
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.rooted_tree import join_root
from dra_driver.inventory.discovery import discover_once
from dra_driver.inventory.host_facts import HostView
from dra_driver.model.host import HostPaths
from dra_driver.model.inventory import Inventory
from dra_driver.nvml.reader import NvmlReader
from gpucheck.guard import ReadOnlyLibrary

NODE = "gpu-check"
"""Name of the node and so of the pool: a fixed one, because what is printed may be passed on."""
_KUBELET_PLUGINS = "/var/lib/kubelet/plugins"


class CannotRunError(Exception):
    """There is nothing to check; the text is one line and says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """Where to look. Roots and the hook have the meaning that they have for the daemon."""

    nvidia_driver_root: str = "/"
    container_driver_root: str = "/driver-root"
    nvidia_cdi_hook_path: str | None = None
    driver_name: str = "gpu.nvidia.com"
    simulate: str | None = None
    nvidia_smi: str | None = None
    nvidia_ctk: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a machine's host is seen and how its NVML is loaded, without the guard."""

    paths: HostPaths
    nodes: DeviceNodeReader
    load_nvml: Callable[[], object]
    is_simulated: bool = False

    def local(self, host_path: str) -> list[str]:
        """Where this process may find a path of the host, the likeliest place first."""
        places = []
        root = self.paths.host_driver_root.rstrip("/")
        if host_path.startswith(f"{root}/"):
            places.append(join_root(self.paths.driver_root, host_path[len(root) :]))
        if self.paths.dev_root is not None:
            places.append(join_root(self.paths.dev_root, host_path))
        else:
            places.append(host_path)
        return list(dict.fromkeys(places))

    def found(self, host_path: str) -> Path | None:
        """The file or directory at a path of the host; None where there is none."""
        return next((path for path in map(Path, self.local(host_path)) if path.exists()), None)


def real_machine(options: Options) -> Machine:
    """This machine, looked at as the daemon does."""
    from dra_driver.nvml.session import load_library

    inside = options.container_driver_root
    root = inside if Path(inside).is_dir() else options.nvidia_driver_root
    paths = HostPaths(
        driver_root=root,
        host_driver_root=options.nvidia_driver_root,
        plugin_directory=f"{_KUBELET_PLUGINS}/{options.driver_name}",
    )
    return Machine(paths, LstatDeviceNodeReader(), lambda: load_library(find_nvml_library(root)))


def simulated_machine(name: str, directory: Path) -> Machine:
    """A machine made of data, rendered into `directory`."""
    from dra_driver.simulator import create_machine, device_node_reader, nvml_library

    machine = create_machine(name, directory, device_nodes="described")
    root = str(machine.host_root)
    paths = HostPaths(
        driver_root=root, host_driver_root=root, dev_root=root, proc=f"{root}/proc", sys=f"{root}/sys"
    )
    return Machine(paths, device_node_reader(machine), lambda: nvml_library(machine), is_simulated=True)


class GuardedNvml(NvmlReader):
    """NVML as discovery wants it, through the guard alone."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(self._guarded)
        self._load = machine.load_nvml
        self._guards: list[ReadOnlyLibrary] = []

    @property
    def refused(self) -> set[str]:
        """Functions that were called and are not allowed."""
        return {name for guard in self._guards for name in guard.refused}

    @property
    def missing(self) -> set[str]:
        """Functions that the driver looked up and that the library does not have."""
        return {name for guard in self._guards for name in guard.missing}

    def _guarded(self) -> object:
        guard = ReadOnlyLibrary(self._load())
        self._guards.append(guard)
        return guard


@dataclass(frozen=True, slots=True)
class View:
    """A machine with what discovery found; NVML is open as long as the view is."""

    machine: Machine
    nvml: GuardedNvml
    inventory: Inventory


@contextmanager
def opened(machine: Machine) -> Iterator[View]:
    """Discover a machine's devices. Raises: CannotRunError if there is no NVML or no GPU."""
    nvml = GuardedNvml(machine)
    try:
        try:
            nvml.session.open()
            inventory = discover_once(nvml, HostView(machine.paths), None)
        except DraDriverError as error:
            raise CannotRunError(str(error)) from error
        if not inventory.gpus:
            raise CannotRunError("NVML answers, but shows no GPU")
        yield View(machine, nvml, inventory)
    finally:
        nvml.close()


@contextmanager
def chosen_machine(options: Options) -> Iterator[Machine]:
    """The machine that the options name; a simulated one lives as long as the block."""
    if options.simulate is None:
        yield real_machine(options)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        try:
            machine = simulated_machine(options.simulate, Path(scratch) / "machine")
        except DraDriverError as error:
            raise CannotRunError(str(error)) from error
        yield machine
