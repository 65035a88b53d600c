"""Where everything of MPS lies below the plugin's directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dra_driver.errors import PermanentError
from dra_driver.files.atomic import QUARANTINE
from dra_driver.model.mps import MpsDirectories
from dra_driver.mps.daemon_processes import users_of

SUFFIX = ".json"
_DEVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class MpsLayout:
    """`<root>/<device>.json` is a daemon's record, `<root>/<device>/{pipe,log,shm}` are its directories.

    A device name has no dot, so nothing of the host can collide with a device's directory.
    """

    root: Path

    @property
    def lock(self) -> Path:
        """Held by the one host process of this directory; says the format of its files."""
        return self.root / "host.lock"

    @property
    def libraries(self) -> Path:
        """Links to the NVIDIA driver's libraries, where they are not where the loader looks."""
        return self.root / "host.lib"

    @property
    def wishes(self) -> Path:
        """What shall run and what shall stop."""
        return self.root / "host.wanted"

    @property
    def statuses(self) -> Path:
        """What runs."""
        return self.root / "host.status"

    def wanted(self, device: str) -> Path:
        """The wish that the daemon runs."""
        return self.wishes / f"{_checked(device)}{SUFFIX}"

    def unwanted(self, device: str) -> Path:
        """The wish that the daemon stops."""
        return self.wishes / f"{_checked(device)}.stop"

    def status(self, device: str) -> Path:
        """What the host says of the daemon."""
        return self.statuses / f"{_checked(device)}{SUFFIX}"

    def record(self, device: str) -> Path:
        """The record of one daemon."""
        return self.root / f"{_checked(device)}{SUFFIX}"

    def record_aside(self, device: str) -> Path:
        """Where a record is that could not be read."""
        return self.root / f"{_checked(device)}{SUFFIX}{QUARANTINE}"

    def directory(self, device: str) -> Path:
        """Everything that exists as long as the daemon does."""
        return self.root / _checked(device)

    def directories(self, device: str) -> MpsDirectories:
        """The parts that clients need."""
        top = self.directory(device)
        return MpsDirectories(pipe=str(top / "pipe"), log=str(top / "log"), shm=str(top / "shm"))

    def has_traces(self, device: str) -> bool:
        """Whether anything of a daemon is left. A compute mode alone does not count: an administrator may have set
        it."""
        return (
            self.directory(device).exists()
            or self.record(device).exists()
            or os.path.lexists(self.record_aside(device))
            or bool(users_of(self.directories(device).pipe))
        )


def mps_layout(plugin_directory: Path) -> MpsLayout:
    """The layout below the plugin's own directory."""
    return MpsLayout(plugin_directory / "mps")


def is_device_name(name: str) -> bool:
    """Whether a device can have this name."""
    return _DEVICE_NAME.fullmatch(name) is not None


def _checked(device: str) -> str:
    if not is_device_name(device):
        raise PermanentError(f"{device!r} is not a device name: it must be a DNS label")
    return device
