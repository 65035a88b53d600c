"""Driver roots with NVIDIA's own programs, next to a C library that is not this machine's.

NVIDIA's programs run on all distributions: they need only symbols of a very old C library, so they run with
any newer one, such as the container's. A program that needs a newer one than the container's cannot work, but
is reported.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import debian_programs
import pytest
from debian_programs import Programs

PROGRAMS = (
    "usr/lib/nvidia/current/nvidia-smi",
    "usr/bin/nvidia-cuda-mps-control",
    "usr/sbin/nvidia-cuda-mps-server",
)
LIBRARIES = ("libnvidia-ml", "libcuda")

_MACHINE_OFFSET = 18
_OF_ARCH = f"usr/lib/{os.uname().machine}-linux-gnu"
_OLDEST = {"x86_64": b"GLIBC_2.2.5", "aarch64": b"GLIBC_2.17"}
"""The version of the C library's symbols that every program needs."""


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


def older_libc() -> Path:
    """The directory with the C library of the release before this machine's. Skips where it cannot be had, fails where
    it could be and was not fetched."""
    if not debian_programs.can_have_libcs():
        pytest.skip(
            f"C libraries of other releases are fetched on Debian {', '.join(debian_programs.RELEASES)} only"
        )
    found = debian_programs.older_libc()
    if found is None:
        pytest.fail("the C library of another release is missing; run: python3 hack/debian_programs.py")
    return found


def install(driver: Programs, top: Path, layout: Layout, libc: Path) -> Path:
    """A driver root below `top` that holds the C library in `libc` in its library directory, as hosts do."""
    root = top / layout.root
    programs, libraries = root / layout.programs, root / layout.libraries
    programs.mkdir(parents=True)
    libraries.mkdir(parents=True)
    for path in PROGRAMS:
        shutil.copy(driver.root / path, programs)
    for name in LIBRARIES:
        file = libraries / driver.library(name).name
        try:
            os.link(driver.library(name), file)
        except OSError:
            shutil.copy(driver.library(name), file)
        (libraries / f"{name}.so.1").symlink_to(file.name)
    for file in libc.iterdir():
        shutil.copy(file, libraries)
    return root


# --- files that cannot be used -------------------------------------------------------------------


def of_another_architecture(file: Path) -> None:
    """Change the file's architecture to IBM's S/390."""
    data = file.read_bytes()
    _write(file, data[:_MACHINE_OFFSET] + (22).to_bytes(2, "little") + data[_MACHINE_OFFSET + 2 :])


def of_an_absent_library(file: Path) -> None:
    """Make it need `libno.so.1` instead of a part of the C library."""
    _replace(file, b"librt.so.1\0", b"libno.so.1\0")


def of_an_absent_loader(file: Path) -> None:
    """Make it name a loader that no system has."""
    _replace(file, b"/ld-linux", b"/ld-other")


def of_a_newer_libc(file: Path) -> None:
    """Make it need a symbol version of the C library that does not exist, by name and hash."""
    old = _OLDEST[os.uname().machine]
    new = old.replace(b"_2.", b"_9.")
    _replace(file, old + b"\0", new + b"\0")
    _replace(file, _hash(old).to_bytes(4, "little"), _hash(new).to_bytes(4, "little"))


def _replace(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    assert len(old) == len(new)
    _write(file, data.replace(old, new))


def _write(file: Path, data: bytes) -> None:
    """To a new file: the old one may be that of the cache."""
    mode = file.stat().st_mode
    file.unlink()
    file.write_bytes(data)
    file.chmod(mode)


def _hash(name: bytes) -> int:
    """As the System V ABI has it for ELF."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value


def loaded(output: str) -> list[str]:
    """The shared objects that a program ran with, from what the loader says with LD_DEBUG=files."""
    return [line.rpartition(" ")[2] for line in output.splitlines() if "calling init: /" in line]
