"""Driver roots with real ELF programs, next to a C library that is not this machine's.

The programs and libraries are linked against the C library of the release before this machine's. So are NVIDIA's: one
build runs on all distributions, so it asks for symbols of a very old one only, and any newer C library runs it. That of
the container does; a program that needs a newer one than the container has cannot be helped, only told.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import elf_programs
import libcs
import pytest

VERSION = "580.65.06"
PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
LIBRARIES = ("libnvidia-ml", "libcuda")

_PROGRAM = Path(__file__).with_name("driver_program.c")
_MACHINE_OFFSET = 18
_OF_ARCH = f"usr/lib/{os.uname().machine}-linux-gnu"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a driver root lies on the host, and its two directories."""

    root: str
    programs: str
    libraries: str


LAYOUTS = {
    "the root of a Debian host": Layout("driver-root", "usr/bin", _OF_ARCH),
    "the root of a Red Hat host": Layout("driver-root", "usr/bin", "usr/lib64"),
    "a driver container": Layout("run/nvidia/driver", "usr/bin", _OF_ARCH),
    "GKE": Layout("home/kubernetes/bin/nvidia", "bin", "lib64"),
}


@dataclass(frozen=True, slots=True)
class ElfDriver:
    """Programs and libraries as the linker made them, in one directory."""

    built: Path
    libc: Path

    def install(self, top: Path, layout: Layout, libc: Path) -> Path:
        """A driver root below `top` that holds `libc` in its library directory, as hosts do."""
        root = top / layout.root
        programs, libraries = root / layout.programs, root / layout.libraries
        programs.mkdir(parents=True)
        libraries.mkdir(parents=True)
        for name in PROGRAMS:
            shutil.copy(self.built / "program", programs / name)
        for name in LIBRARIES:
            shutil.copy(self.built / "library", libraries / f"{name}.so.{VERSION}")
            (libraries / f"{name}.so.1").symlink_to(f"{name}.so.{VERSION}")
        for file in libc.iterdir():
            shutil.copy(file, libraries / file.name)
        return root

    def program(self, output: Path, *options: str) -> None:
        """Build the driver's program anew with further options for compiler and linker."""
        elf_programs.link(_PROGRAM, output, self.libc, *options)

    def library(self, output: Path, *options: str) -> None:
        """The same for the driver's library."""
        elf_programs.link(elf_programs.LIBRARY, output, self.libc, "-shared", "-fPIC", *options)

    def missing(self, name: str, version: str = "") -> tuple[str, ...]:
        """Options that make what is built need the library `name`, or a `version` of its symbols that nobody has."""
        source, library = self.built / "missing.c", self.built / f"{name}{version}"
        source.write_text("int of_the_future(void) { return 1; }\n")
        script = self.built / "versions"
        script.write_text(f"{version} {{ of_the_future; }};\n")
        versions = [f"-Wl,--version-script={script}"] if version else []
        elf_programs.compile_c(
            source, library, "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}", *versions
        )
        return "-DNEEDS=of_the_future", str(library)


def of_another_architecture(program: Path) -> None:
    """Make the file say that it is of IBM's S/390."""
    data = bytearray(program.read_bytes())
    data[_MACHINE_OFFSET : _MACHINE_OFFSET + 2] = (22).to_bytes(2, "little")
    program.write_bytes(data)


def build_elf_driver(built: Path) -> ElfDriver:
    """Build in the directory `built`. Skips where this cannot be had, fails where it could be and was not fetched."""
    if not libcs.can_be_had():
        pytest.skip(f"C libraries of other releases are fetched on Debian {', '.join(libcs.RELEASES)} only")
    older = libcs.older()
    if shutil.which("cc") is None or older is None:
        pytest.fail("a C compiler or the C library of another release is missing; run: python3 hack/libcs.py")
    driver = ElfDriver(built, older)
    driver.program(built / "program")
    driver.library(built / "library")
    return driver


def loaded(output: str) -> list[str]:
    """The shared objects that a program of the driver says it runs with."""
    return [line.removeprefix("loaded ") for line in output.splitlines() if line.startswith("loaded ")]
