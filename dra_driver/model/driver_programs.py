"""The installed driver's programs, and what they need to run outside their own root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dra_driver.errors import RetryableError

CONTROL_PROGRAM = "nvidia-cuda-mps-control"
SERVER_PROGRAM = "nvidia-cuda-mps-server"
SMI_PROGRAM = "nvidia-smi"


@dataclass(frozen=True, slots=True)
class DriverPrograms:
    """How to run the driver's programs: `paths` has their paths for this process, by name.

    `search_path` is their PATH. `library_path` is their LD_LIBRARY_PATH, None if the loader finds the driver's
    libraries by itself.
    """

    root: str
    paths: Mapping[str, str]
    search_path: str
    library_path: str | None = None

    def path(self, name: str) -> str:
        """The path of a program. Raises: RetryableError if it is not installed."""
        found = self.paths.get(name)
        if found is None:
            raise RetryableError(
                f"{name} is not below the driver root {self.root}: install the package of the NVIDIA driver that "
                "has it, or set the driver root to where it is"
            )
        return found

    def environment(self) -> dict[str, str]:
        """The environment for every program of the driver."""
        directories = dict.fromkeys(path.rpartition("/")[0] for path in self.paths.values())
        found = {"PATH": ":".join([*directories, self.search_path])}
        if self.library_path is not None:
            found["LD_LIBRARY_PATH"] = self.library_path
        return found


FindPrograms = Callable[[], DriverPrograms]
"""Looks for the installed driver again at each call, since it may come or be replaced later. Raises: StateError."""
