"""Simulated machines with GPUs, for tests and for clusters without GPUs.

`SimulatedLibrary` replaces the NVML library in the binding. See machines/README.md for the format of machine files.
"""

from __future__ import annotations

import os
from pathlib import Path

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.simulator import catalogue
from dra_driver.simulator.catalogue import machine_names
from dra_driver.simulator.hostroot.entries import can_make_nodes
from dra_driver.simulator.hostroot.kernel import FIRST_SRIOV, SimulatedDeviceNodes
from dra_driver.simulator.library import SimulatedLibrary
from dra_driver.simulator.machine import Machine, Selector, virtual_functions
from dra_driver.simulator.machine_state import State
from dra_driver.simulator.pci_control import SimulatedPciControl

__all__ = [
    "Machine",
    "Selector",
    "SimulatedDeviceNodes",
    "SimulatedLibrary",
    "SimulatedPciControl",
    "create_machine",
    "machine_names",
    "open_machine",
    "require_machine",
]
HOSTILE = "SIMULATE_HOSTILE"
"""An environment variable that makes new machines behave like difficult real ones; the project's tests set it."""
ELF = "SIMULATE_ELF"
"""With HOSTILE: a directory of ELF files that replace the scripts, on machines of this host's architecture."""
_OWN_FILES = ("machine.", "rendered", "root", ".")
"""Some exist before machine.json."""


def create_machine(
    name: str, directory: Path, *, device_nodes: str = "auto", cdi_hook: bool | None = None
) -> Machine:
    """Create a machine, or open it if the directory already contains a machine of this name.

    `name` is one of `machine_names()` or a path to a YAML file. `device_nodes` is "real" (needs root), "described" or
    "auto". Raises: InvalidConfigError; StateError for a directory that contains another machine or other files.
    """
    state = catalogue.build(name)
    hostile = os.environ.get(HOSTILE) == "true"
    if hostile:
        _make_hostile(state)
    if directory.is_dir() and not (directory / "machine.json").is_file():
        others = [entry.name for entry in directory.iterdir() if not entry.name.startswith(_OWN_FILES)]
        if others:
            raise StateError(
                f"{directory} contains other files, such as {min(others)}, but no simulated machine; use a directory "
                "that is empty or does not exist yet"
            )
    directory.mkdir(parents=True, exist_ok=True)
    if device_nodes not in ("auto", "real", "described"):
        raise InvalidConfigError(f"device nodes can be 'auto', 'real' or 'described', not {device_nodes!r}")
    if device_nodes == "auto":
        device_nodes = "real" if can_make_nodes(directory) else "described"
    state.device_nodes = device_nodes
    if cdi_hook is not None:
        state.system["cdi_hook"] = cdi_hook
    machine = Machine(directory.resolve())
    elf_files = os.environ.get(ELF)
    if hostile and elf_files and state.system["arch"] == os.uname().machine:
        machine.keep_elf_files(Path(elf_files))
    machine.setup(state)
    return machine


def _make_hostile(state: State) -> None:
    """Enable difficult but valid behaviour of real machines.

    Capability nodes of MIG devices exist only after someone creates them, and the first GPU has virtual functions.
    """
    state.system["cap_nodes"] = False
    has_some = any(item.physical for item in state.functions)  # a recorded machine may have virtual functions
    for gpu in [] if has_some else state.present[:1]:
        if state.model_of(gpu).compute >= FIRST_SRIOV and not gpu.virtualization:
            state.functions += virtual_functions(state, gpu, 2)


def open_machine(directory: Path) -> Machine:
    require_machine(directory)
    machine = Machine(directory.resolve())
    machine.heal()
    return machine


def require_machine(directory: Path) -> None:
    if not (directory / "machine.json").is_file():
        raise StateError(
            f"there is no simulated machine in {directory}; create one with "
            f"`gpu-dra-driver simulate create NAME --simulator-dir {directory}`"
        )
