"""Simulated machines as the rooms see them: through the real binding, over a rendered host root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pynvml

from dra_driver.model.gpu import Gpu
from dra_driver.model.host import HostPaths
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance
from dra_driver.model.pulse import Pulse
from dra_driver.nvml.discovery import read_inventory, read_pulse
from dra_driver.nvml.partitions import read_what_exists
from dra_driver.nvml.session import NvmlSession
from dra_driver.services.discovery import Discovery
from dra_driver.services.hostview import HostView
from dra_driver.simulator import Machine, create_machine, nvml_library


@dataclass
class SessionNvml:
    """NVML as discovery wants it."""

    session: NvmlSession

    def reopen(self) -> None:
        self.session.reopen()

    def close(self) -> None:
        self.session.close()

    def read_inventory(self) -> Inventory:
        return read_inventory()

    def read_what_exists(self, gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        return read_what_exists(gpu)

    def pulse(self) -> Pulse:
        return read_pulse()


class SimulatedNode:
    """One machine with its NVML session and its host."""

    def __init__(self, name: str, directory: Path) -> None:
        self.machine: Machine = create_machine(name, directory, device_nodes="described")
        root = self.machine.host_root
        self.paths = HostPaths(
            driver_root=str(root),
            host_driver_root=str(root),
            dev_root=str(root),
            proc=str(root / "proc"),
            sys=str(root / "sys"),
        )
        self.session = NvmlSession(lambda: nvml_library(self.machine))
        self.nvml = SessionNvml(self.session)
        self.changes = 0

    def read(self) -> Inventory:
        """What NVML tells now, in a new session."""
        self.session.reopen()
        return read_inventory()

    def discovery(self) -> Discovery:
        return Discovery(self.nvml, HostView(self.paths), self._changed)

    def discover(self) -> Inventory:
        """NVML's part and the host's part."""
        discovery = self.discovery()
        discovery.scan_now(5)
        assert discovery.inventory is not None, discovery.state.problem
        return discovery.inventory

    def close(self) -> None:
        self.session.close()
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def _changed(self) -> None:
        self.changes += 1
