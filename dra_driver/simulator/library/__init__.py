"""A libnvidia-ml made of Python: the same function names, the same ctypes structures, the same return codes."""

from dra_driver.simulator.library.assemble import SimulatedLibrary

__all__ = ["SimulatedLibrary"]
