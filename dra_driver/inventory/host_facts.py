"""What discovery reads of the host."""

from __future__ import annotations

from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.fingerprint import HostFingerprintReader, driver_fingerprint
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.fingerprint import HostFingerprint
from dra_driver.model.host import HostPaths


class HostView(Sysfs):
    """PCI places and the fingerprint of one host."""

    def __init__(self, paths: HostPaths, *, imex: bool = False, files: DriverRoot | None = None) -> None:
        """Without `imex` nobody looks at IMEX channels, without `files` nobody at the NVIDIA driver's files."""
        super().__init__(paths.sys, paths.proc)
        self._channels = ImexChannelNodes(paths.proc) if imex else None
        self._files = files
        self._fingerprints = HostFingerprintReader(paths.sys, paths.proc)

    def imex_channels(self) -> int | None:
        """How many IMEX channels the NVIDIA driver has; None for none, and if nobody wants any."""
        return None if self._channels is None else self._channels.count()

    def files_problem(self, nvml_version: str | None) -> str | None:
        """As `DriverRoot.problem`."""
        return None if self._files is None else self._files.problem(nvml_version)

    def is_bound(self, bus_id: str) -> bool:
        """Whether the function is there and bound to the NVIDIA driver."""
        return self.bound_driver(bus_id) == "nvidia"

    def fingerprint(self) -> HostFingerprint:
        """What the host shows now."""
        return self._fingerprints.read()

    def driver(self) -> str:
        """A value that differs when another driver was loaded; empty while none is."""
        return driver_fingerprint(str(self._proc))
