"""The installed driver's programs, and what they need to run outside of their own root."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dra_driver.errors import RetryableError, StateError

CONTROL_PROGRAM = "nvidia-cuda-mps-control"
SERVER_PROGRAM = "nvidia-cuda-mps-server"
SMI_PROGRAM = "nvidia-smi"


@dataclass(frozen=True, slots=True)
class DriverPrograms:
    """How the driver's programs are run: `paths` by name, as this process sees them.

    `search_path` is their PATH. `library_path` is their LD_LIBRARY_PATH, None where the loader finds the driver's
    libraries by itself.
    """

    root: str
    paths: Mapping[str, str]
    search_path: str
    library_path: str | None = None

    def path(self, name: str) -> str:
        """Where a program is. Raises: RetryableError."""
        found = self.paths.get(name)
        if found is None:
            raise RetryableError(
                f"{name} is not below the driver root {self.root}: install the package of the NVIDIA driver that "
                "has it, or set the driver root to where it is"
            )
        return found

    def environment(self) -> dict[str, str]:
        """What every program of the driver gets."""
        directories = dict.fromkeys(os.path.dirname(path) for path in self.paths.values())  # noqa: PTH120
        found = {"PATH": ":".join([*directories, self.search_path])}
        if self.library_path is not None:
            found["LD_LIBRARY_PATH"] = self.library_path
        return found


FindPrograms = Callable[[], DriverPrograms]
"""Finds the installed driver anew, since it may come or be replaced later. Raises: RetryableError."""


class InstalledPrograms:
    """Finds the programs at each call.

    Where the driver is not installed in `/`, its programs find its libraries through a directory of links: the
    library directories of another system would bring its C library along, with which nothing starts.
    """

    def __init__(
        self,
        root: str,
        find: Callable[[str], str | None],
        libraries: Callable[[], Mapping[str, str]],
        links: Path,
        search_path: str,
    ) -> None:
        """`find` gives the path of a program, `libraries` the file of each library name that a loader asks for."""
        self._root = root
        self._find = find
        self._libraries = libraries
        self._links = links
        self._search_path = search_path
        self._linked_for: object = None
        self._lock = threading.Lock()

    def __call__(self) -> DriverPrograms:
        names = (CONTROL_PROGRAM, SERVER_PROGRAM, SMI_PROGRAM)
        paths = {name: path for name in names if (path := self._find(name)) is not None}
        elsewhere = self._root.rstrip("/") != ""
        if elsewhere:
            with self._lock:
                self._link(paths)
        return DriverPrograms(self._root, paths, self._search_path, str(self._links) if elsewhere else None)

    def _link(self, paths: Mapping[str, str]) -> None:
        """Make the links; only once for the same programs, since a driver brings libraries and programs at once."""
        mark = tuple((path, _changed_at(path)) for path in paths.values())
        if mark == self._linked_for and self._links.is_dir():
            return
        wanted = self._libraries()
        try:
            self._links.mkdir(parents=True, exist_ok=True)
            self._links.chmod(0o755)
            for link in self._links.iterdir():
                if link.name not in wanted:
                    link.unlink()
            for name, target in wanted.items():
                _point(self._links / name, target)
        except OSError as error:
            raise StateError(
                f"cannot link the driver's libraries in {self._links}: {error.strerror}"
            ) from error
        self._linked_for = mark


def _point(link: Path, target: str) -> None:
    with suppress(OSError):
        if str(link.readlink()) == target:
            return
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _changed_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0
