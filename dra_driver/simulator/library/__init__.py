"""A libnvidia-ml in Python: the same function names, ctypes structures and return codes."""

from dra_driver.simulator.library.assemble import SimulatedLibrary

__all__ = ["SimulatedLibrary"]
