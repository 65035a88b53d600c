"""Simulated machines as the rooms see them: through the real binding, over a rendered host root."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pynvml

from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import Discovery, discover_once
from dra_driver.inventory.rules.assembly import with_nvlink_domains
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import HostPaths
from dra_driver.model.inventory import Inventory
from dra_driver.nvml.reader import NvmlReader
from dra_driver.nvml.scan import ForeignInstances, ScanMemory, read_gpus
from dra_driver.passthrough.cards import KnownCards
from dra_driver.simulator import Machine, SimulatedLibrary, create_machine


def read_inventory(
    on_demand: Callable[[Gpu], bool] | None = None,
    memory: ScanMemory | None = None,
    foreign_instances: ForeignInstances | None = None,
) -> Inventory:
    """What NVML shows in the session that is open, with NVLink domains."""
    return with_nvlink_domains(read_gpus(on_demand, memory or ScanMemory(), foreign_instances))


def silence(machine: Machine, gpu: int) -> None:
    """Every query to the GPU fails, as after the death of its system processor. The kernel driver still has the handle,
    the UUID and the minor number."""
    for pattern in (
        "nvmlDeviceGet[!HMU]*",
        "nvmlDeviceGetM[!i]*",
        "nvmlDeviceGetMi[!n]*",
        "nvmlDeviceGetU[!U]*",
    ):
        machine.set_fault(pattern, code="unknown", gpu=gpu)


class Work(NamedTuple):
    """What a simulated GPU has done until a moment: seconds, busy seconds, joules."""

    seconds: float
    busy_s: float
    joules: float

    @classmethod
    def of(cls, machine: Machine, index: int) -> Work:
        state, now = machine.current(), time.time()
        gpu = state.gpus[index]
        busy_s, limit_w = gpu.busy_s(now), state.model_of(gpu).power_limit_w
        return cls(now, busy_s, limit_w * (0.1 * now + 0.8 * busy_s))

    def since(self, other: Work) -> list[float]:
        return [late - early for late, early in zip(self, other, strict=True)]


def assert_done(part: dict[str, float], begun: tuple[Work, Work], ended: tuple[Work, Work]) -> None:
    """The part of a receipt agrees to 5 % with what its GPU did between the claim's Prepare and its end. Each has the
    readings before and after it."""
    least, most = ended[0].since(begun[1]), ended[1].since(begun[0])
    values = part["gpu_seconds"], part["busy_gpu_seconds"], part["energy_joules"]
    for low, value, high in zip(least, values, most, strict=True):
        assert low * 0.95 <= value <= high * 1.05, (least, values, most)


class SimulatedNode:
    """One machine with its NVML session and its host."""

    def __init__(self, name: str, directory: Path, on_demand: Callable[[Gpu], bool] | None = None) -> None:
        self.machine: Machine = create_machine(name, directory, device_nodes="described")
        root = self.machine.host_root
        self.paths = HostPaths(
            driver_root=str(root),
            host_driver_root=str(root),
            dev_root=str(root),
            proc=str(root / "proc"),
            sys=str(root / "sys"),
        )
        self.host = Sysfs(self.paths.sys, self.paths.proc)
        self.nvml = NvmlReader(lambda: SimulatedLibrary(self.machine), on_demand)
        self.session = self.nvml.session
        self.changes = 0

    def read(self) -> Inventory:
        """Read NVML in a new session."""
        self.session.reopen()
        return read_inventory()

    def discovery(self) -> Discovery:
        return Discovery(self.nvml, self.host, self._changed, list, None, list)

    def discover(self, cards: KnownCards | None = None) -> Inventory:
        """NVML's part and the host's part."""
        if cards is None:
            return discover_once(self.nvml, self.host, None)
        return discover_once(self.nvml, self.host, None, cards.read)

    def close(self) -> None:
        self.session.close()
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def _changed(self) -> None:
        self.changes += 1
