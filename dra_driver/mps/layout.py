"""Where everything of MPS lies below the plugin's directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dra_driver.errors import PermanentError
from dra_driver.model.mps import MpsDirectories

SUFFIX = ".json"
_DEVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class MpsLayout:
    """`<root>/<device>.json` is a daemon's record, `<root>/<device>/{pipe,log,shm}` are its directories.

    A device name has no dot, so no record, socket or lock can collide with a device's directory.
    """

    root: Path

    @property
    def socket(self) -> Path:
        """Where the host process listens."""
        return self.root / "host.sock"

    @property
    def lock(self) -> Path:
        """Held by the one host process of this directory."""
        return self.root / "host.lock"

    @property
    def libraries(self) -> Path:
        """Links to the driver's libraries, where they are not where the loader looks."""
        return self.root / "host.lib"

    def record(self, device: str) -> Path:
        """The record of one daemon."""
        return self.root / f"{_checked(device)}{SUFFIX}"

    def directory(self, device: str) -> Path:
        """Everything that exists as long as the daemon does."""
        return self.root / _checked(device)

    def directories(self, device: str) -> MpsDirectories:
        """The parts that clients need."""
        top = self.directory(device)
        return MpsDirectories(pipe=str(top / "pipe"), log=str(top / "log"), shm=str(top / "shm"))


def mps_layout(plugin_directory: Path) -> MpsLayout:
    """The layout below the plugin's own directory."""
    return MpsLayout(plugin_directory / "mps")


def _checked(device: str) -> str:
    if not _DEVICE_NAME.fullmatch(device):
        raise PermanentError(f"{device!r} is not a device name: it must be a DNS label")
    return device
