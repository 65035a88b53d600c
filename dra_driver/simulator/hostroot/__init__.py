"""The files, links and device nodes by which a host shows its GPUs, as a tree below one directory."""

from dra_driver.simulator.hostroot.render import HostRoot

__all__ = ["HostRoot"]
