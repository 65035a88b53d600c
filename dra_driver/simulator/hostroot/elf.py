"""The NVIDIA driver's programs and libraries as ELF files, where the machine was made with some (`SIMULATE_ELF`).

Real ones are ELF files that need libraries of the NVIDIA driver, and the C library beside those is not the container's.
`program` is all programs, and becomes the simulator's script: the text behind its end, or the file of its name in
usr/libexec. `library` is libnvidia-ml and libcuda, `libc` a C library that no program of a container can use.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dra_driver.simulator.hostroot.entries import Entries, Text
from dra_driver.simulator.state import State

_FILES = ("program", "library", "libc")
_ALONE = "nvidia-smi"
"""Runs in containers too, which have nothing but this file."""
_IN_LIBEXEC = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")


class ElfFiles:
    """What a machine's directory has of them; without any, its programs stay scripts and its libraries placeholders."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "elf"
        self._known: dict[str, bytes] = {}

    def keep(self, source: Path) -> None:
        """Make them part of the machine, which other containers than this may open."""
        self._directory.mkdir(exist_ok=True)
        for name in _FILES:
            shutil.copy(source / name, self._directory / name)

    def replace_in(self, entries: Entries, state: State) -> None:
        """Put them in the place of scripts and placeholders."""
        if not self._known:
            if not self._directory.is_dir():
                return
            self._known = {name: (self._directory / name).read_bytes() for name in _FILES}
        program, version = self._known["program"], state.driver_version
        script = entries[f"usr/bin/{_ALONE}"]
        if isinstance(script, Text):
            entries[f"usr/bin/{_ALONE}"] = Text(program + script.raw, 0o755)
        for name in _IN_LIBEXEC:
            entries[f"usr/libexec/{name}"] = entries[f"usr/bin/{name}"]
            entries[f"usr/bin/{name}"] = Text(program, 0o755)
        libraries = f"usr/lib/{state.system['arch']}-linux-gnu"
        for name in ("libnvidia-ml", "libcuda"):
            entries[f"{libraries}/{name}.so.{version}"] = Text(self._known["library"])
        entries[f"{libraries}/libc.so.6"] = Text(self._known["libc"])
