"""A Python object in the place of the NVML library, with every C function that the simulated driver version has."""

from __future__ import annotations

from typing import Any

from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.library.device import Device, Fields, Gpm
from dra_driver.simulator.library.instances import Instances
from dra_driver.simulator.library.links import Links
from dra_driver.simulator.library.system import System, Waiting

__all__ = ["SimulatedLibrary"]
_PREFIX = "nvml"


class _Topics(System, Device, Fields, Gpm, Instances, Links, Waiting):
    pass


class SimulatedLibrary:
    """Replaces the ctypes library in the binding.

    A function that the driver's version does not have is not an attribute, like a missing symbol. The version is fixed
    when the object is made; after a driver upgrade only a new object works.
    """

    def __init__(self, machine: Any) -> None:
        topics = _Topics(machine)
        state = machine.current()
        major = int(state.driver_version.partition(".")[0])
        later = driver_facts()["functions_since"].items()
        missing = {name for since, names in later if since > major for name in names}
        missing.update(state.missing_functions)
        for name in dir(topics):
            if not name.startswith(_PREFIX) or name in missing:
                continue
            method = getattr(topics, name)
            setattr(self, name, method if name == "nvmlErrorString" else topics.entry(name, method))
        self._error_string(topics)

    def _error_string(self, topics: _Topics) -> None:
        """The binding sets `restype` on this one, which a bound method would refuse."""

        def text_of(code: Any) -> bytes:
            return topics.nvmlErrorString(code)

        self.nvmlErrorString = text_of
