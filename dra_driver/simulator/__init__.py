"""Simulated machines with GPUs, for tests and for clusters without GPUs.

`create_machine` writes a host root and keeps the machine's state in a locked file. `nvml_library` makes an object that
replaces the NVML library in the binding. See machines/README.md for the format.
"""

from __future__ import annotations

from pathlib import Path

from dra_driver.simulator.base import Selector
from dra_driver.simulator.catalogue import machine_names
from dra_driver.simulator.hostroot.devices import SimulatedDeviceNodes
from dra_driver.simulator.library import SimulatedLibrary
from dra_driver.simulator.machine import Machine, create, open_existing

__all__ = [
    "Machine",
    "Selector",
    "SimulatedDeviceNodes",
    "create_machine",
    "device_node_reader",
    "machine_names",
    "nvml_library",
    "open_machine",
]


def create_machine(
    name: str, directory: Path, *, device_nodes: str = "auto", cdi_hook: bool | None = None
) -> Machine:
    """Create a machine, or open it if the directory holds one of the same name.

    `name` is one of `machine_names()` or a path to a YAML file. `device_nodes` is "real" (needs root),
    "described" or "auto". `cdi_hook` puts an nvidia-cdi-hook into the driver's programs.

    Raises: InvalidConfigError for an unknown name or a bad file, StateError for a directory that holds
    another machine.
    """
    return create(name, directory, device_nodes=device_nodes, cdi_hook=cdi_hook)


def open_machine(directory: Path) -> Machine:
    """The machine in a directory. Raises: StateError if there is none."""
    return open_existing(directory)


def nvml_library(machine: Machine) -> object:
    """A stand-in for the NVML library, of the driver version that is loaded now."""
    return SimulatedLibrary(machine)


def device_node_reader(machine: Machine) -> SimulatedDeviceNodes:
    """Reads the machine's device nodes, real or described."""
    return SimulatedDeviceNodes(machine.host_root)
