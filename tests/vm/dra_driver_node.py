"""The daemon on the kernel of this machine with the simulator's NVML: `gpu-dra-driver run` on other hardware.

NVML shows the GPUs that the kernel's NVIDIA driver has when it is opened, and keeps their device nodes open until it is
closed, as the real library does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from dra_driver.app import daemon  # noqa: E402
from dra_driver.app.platforms import Platform  # noqa: E402
from dra_driver.app.settings import Settings  # noqa: E402
from dra_driver.cli.main import main  # noqa: E402
from dra_driver.host.device_nodes import LstatDeviceNodeReader  # noqa: E402
from dra_driver.host.vfio import HostPciControl  # noqa: E402
from dra_driver.model.host import HostPaths  # noqa: E402
from dra_driver.simulator import Machine, create_machine  # noqa: E402
from dra_driver.simulator.library import SimulatedLibrary  # noqa: E402


class KernelLibrary(SimulatedLibrary):
    """The simulator's NVML for the GPUs that the kernel's driver has."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._machine = machine
        self._nodes: list[int] = []
        self._count = 0
        for name in ("nvmlInit_v2", "nvmlInitWithFlags"):
            setattr(self, name, self._opened(getattr(self, name)))
        self._shutdown = self.nvmlShutdown
        self.nvmlShutdown = self._closed

    def _opened(self, init: Any) -> Any:
        def opened(*arguments: Any) -> int:
            if not self._count:
                self._look()
            code: int = init(*arguments)
            self._count += not code
            return code

        return opened

    def _look(self) -> None:
        with self._machine._change() as state:
            for gpu in state.gpus:
                driver = Path("/sys/bus/pci/devices", gpu.bus_id, "driver")
                gpu.driver = driver.resolve().name if driver.exists() else ""
                if gpu.driver == "nvidia":
                    self._nodes.append(os.open(f"/dev/nvidia{gpu.minor}", os.O_RDWR | os.O_CLOEXEC))

    def _closed(self) -> int:
        code: int = self._shutdown()
        self._count -= not code
        while not self._count and self._nodes:
            os.close(self._nodes.pop())
        return code


def platform_of(settings: Settings) -> Platform:
    """This machine's kernel, and the NVIDIA driver's files of the simulated machine."""
    machine = create_machine(str(settings.simulate), Path(str(settings.simulator_dir)))
    root = str(machine.host_root)
    paths = HostPaths(
        root, root, dev_root="/", host_root="/", plugin_directory=str(settings.plugin_directory)
    )
    return Platform(paths, LstatDeviceNodeReader(), lambda: KernelLibrary(machine), HostPciControl("/"))


if __name__ == "__main__":
    daemon.platform_of = platform_of
    main()
