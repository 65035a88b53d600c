"""Simulated machines with GPUs, for tests and for clusters without GPUs.

`create_machine` writes a host root and keeps the machine's state in a locked file. `nvml_library` makes an object that
replaces the NVML library in the binding. See machines/README.md for the format.
"""

from __future__ import annotations

from dra_driver.simulator.base import Selector
from dra_driver.simulator.catalogue import machine_names
from dra_driver.simulator.hostroot.kernel import SimulatedDeviceNodes
from dra_driver.simulator.library import SimulatedLibrary
from dra_driver.simulator.machine import Machine, create_machine, open_machine
from dra_driver.simulator.pci_control import SimulatedPciControl

__all__ = [
    "Machine",
    "Selector",
    "SimulatedDeviceNodes",
    "SimulatedPciControl",
    "create_machine",
    "device_node_reader",
    "machine_names",
    "nvml_library",
    "open_machine",
]


def nvml_library(machine: Machine) -> object:
    """A stand-in for the NVML library, of the driver version that is loaded now."""
    return SimulatedLibrary(machine)


def device_node_reader(machine: Machine) -> SimulatedDeviceNodes:
    """Reads the machine's device nodes, real or described."""
    return SimulatedDeviceNodes(machine.host_root)
