"""Settings that nvidia-smi, here a shell script, can change too: a small file for each GPU.

The files are inside the host root, so that the script finds them from its own path, also after a chroot.
"""

from __future__ import annotations

import shutil
from pathlib import Path

COMPUTE_MODE = "compute-mode"
TIMESLICE = "timeslice"


class Policies:
    """`<host root>/var/lib/nvidia-simulator/<setting>/<GPU UUID>`; no file means the default, 0."""

    def __init__(self, host_root: Path) -> None:
        self.directory = host_root / "var/lib/nvidia-simulator"

    def prepare(self) -> None:
        for setting in (COMPUTE_MODE, TIMESLICE):
            (self.directory / setting).mkdir(parents=True, exist_ok=True)

    def get(self, setting: str, uuid: str) -> int:
        try:
            with open(f"{self.directory}/{setting}/{uuid}", "rb") as file:  # noqa: PTH123 - on the path of NVML calls
                return int(file.read() or 0)
        except (OSError, ValueError):
            return 0

    def set(self, setting: str, uuid: str, value: int) -> None:
        path = self.directory / setting / uuid
        if value == 0:
            path.unlink(missing_ok=True)
            return
        temporary = path.with_name(f".{uuid}.new")
        temporary.write_text(f"{value}\n")
        temporary.replace(path)

    def forget(self, uuid: str) -> None:
        """Set the defaults of one GPU again."""
        for setting in (COMPUTE_MODE, TIMESLICE):
            self.set(setting, uuid, 0)

    def reset(self) -> None:
        """Set the defaults again, as a driver reload or a reboot does."""
        for setting in (COMPUTE_MODE, TIMESLICE):
            shutil.rmtree(self.directory / setting, ignore_errors=True)
        self.prepare()
