"""A Python object that replaces the NVML library, with every C function of the simulated driver version."""

from __future__ import annotations

from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.faults import error_text
from dra_driver.simulator.library.core import number
from dra_driver.simulator.library.device import Device, Gpm, Links
from dra_driver.simulator.library.instances import Instances
from dra_driver.simulator.library.system import System, Waiting
from dra_driver.simulator.machine import Machine

__all__ = ["SimulatedLibrary"]


class _Topics(System, Device, Gpm, Instances, Links, Waiting):
    pass


class SimulatedLibrary:
    """A function that the driver version does not have is a missing attribute. The version is fixed at creation."""

    def __init__(self, machine: Machine) -> None:
        topics, state = _Topics(machine), machine.current()
        later = driver_facts()["functions_since"].items()
        missing = {name for since, names in later if since > state.branch for name in names}
        functions = {name: getattr(topics, name) for name in dir(topics) if name.startswith("nvml")}
        for name, function in (functions | topics.getters).items():
            if name not in missing.union(state.missing_functions):
                setattr(self, name, topics.entry(name, function))

    # The binding sets `restype` on this function, which a bound method does not allow.
    nvmlErrorString = staticmethod(lambda code: error_text(number(code)).encode())  # noqa: N815
