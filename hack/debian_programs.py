#!/usr/bin/env python3
"""Programs from Debian for tests: a C compiler, C libraries of the releases before and after this machine's,
and NVIDIA's own nvidia-smi, MPS programs, libnvidia-ml and libcuda of several driver branches.

NVIDIA's programs start without a GPU, so tests can check their messages. They are not committed, and not part of an
image or a release. With the compiler and the C libraries, the NVIDIA driver of a simulated machine has ELF files as its
programs and libraries. They are linked against the C library of the release before this machine's, so they also run
with newer ones.

python3 hack/debian_programs.py    installs the compiler, and downloads missing programs to the user's cache
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# hack/cluster has the code that downloads packages.
sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from localcluster import debian, shell
from localcluster.layout import Layout
from localcluster.shell import ClusterError

RELEASES = ("bullseye", "bookworm", "trixie", "forky")
"""The releases with known C libraries, oldest first."""
SUITES = ("bullseye", "bookworm", "trixie", "experimental")
"""The suites with NVIDIA's programs; each has a different branch of the NVIDIA driver."""
LIBC_FILES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")
SOURCES = Path(__file__).with_name("elf")
LIBRARY = SOURCES / "library.c"
_PACKAGES = ("nvidia-cuda-mps", "nvidia-smi", "libnvidia-ml1", "libcuda1")
_LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
_VERSION = re.compile(r"libnvidia-ml\.so\.(\d+\.[\d.]+)")


def main() -> int:
    """Install and download what is missing; return 1 if something failed."""
    has_nvidia = shell.find_program("apt-get") is not None and debian.is_debian()
    if not has_nvidia and not can_have_libcs():
        shell.say("This is not Debian: tests of ELF files and of NVIDIA's own programs will be skipped.")
        return 0
    missing = 0
    if can_have_libcs():
        own = RELEASES.index(debian.own_release())
        missing += _tried("a C compiler", partial(debian.install_missing, debian.COMPILER))
        for release in RELEASES[:own][-1:]:
            missing += _tried(f"the C library of {release}", partial(_fetch_libc, release))
        for release in RELEASES[own + 1 :][:1]:  # may not be released yet, or be signed with a newer key
            _tried(f"the C library of {release}", partial(_fetch_libc, release))
    for suite in SUITES if has_nvidia else ():
        missing += _tried(f"NVIDIA's programs of {suite}", partial(_fetch_nvidia, suite))
    return min(missing, 1)


def _tried(what: str, act: Callable[[], object]) -> bool:
    """Call `act`, and return whether it failed."""
    try:
        act()
    except ClusterError as error:
        shell.say(f"Tests will run without {what}: {' '.join(str(error).split())}")
        return True
    return False


def _cached(*names: str) -> Path:
    return Layout.from_environment().cache.joinpath(*names[:-1], f"{names[-1]}-{os.uname().machine}")


# --- C libraries ------------------------------------------------------------------------------------


def can_have_libcs() -> bool:
    """Whether this machine has apt-get and runs one of `RELEASES`, so that the previous and next ones are known."""
    return shell.find_program("apt-get") is not None and debian.own_release() in RELEASES


def older_libc() -> Path | None:
    """Return the directory of the C library of the previous release; None if it was not downloaded."""
    return _libc_of(RELEASES[: RELEASES.index(debian.own_release())][-1:])


def newer_libc() -> Path | None:
    """Return the directory of the C library of the next release; None if it was not downloaded."""
    return _libc_of(RELEASES[RELEASES.index(debian.own_release()) + 1 :][:1])


def _libc_of(releases: Sequence[str]) -> Path | None:
    return next((found for release in releases if (found := _cached("libc", release)).is_dir()), None)


def _fetch_libc(release: str) -> None:
    def make(top: Path) -> Path:
        return _beside_one_another(debian.unpack(["libc6"], release, top / "tree"))

    debian.keep(_cached("libc", release), f"the C library of {release}", make)


def _beside_one_another(tree: Path) -> Path:
    found, chosen = next(tree.rglob("libc.so.6")), tree / "chosen"
    chosen.mkdir()
    for path in sorted(found.parent.iterdir()):
        if path.name in LIBC_FILES or path.name.startswith("ld-linux"):
            shutil.copy(path, chosen / path.name)
    return chosen


# --- the ELF files of simulated machines ------------------------------------------------------------


def hostile() -> dict[str, str]:
    """Return the environment variables that make new simulated machines behave like difficult real ones."""
    elf = elf_directory()
    return {"SIMULATE_HOSTILE": "true"} | ({} if elf is None else {"SIMULATE_ELF": str(elf)})


def elf_directory() -> Path | None:
    """Return the directory for SIMULATE_ELF, with `program`, `library` and `libc`. It is built in the user's cache.

    None if this machine runs none of `RELEASES`, or if `main` has not yet installed a compiler and downloaded the older
    C library.
    """
    older = older_libc() if can_have_libcs() and shutil.which("cc") else None
    if older is None:
        return None
    content = b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))
    built = Layout.from_environment().cache / f"elf-{older.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if not built.is_dir():
        # Another process may build the same directory; the first result is kept.
        unfinished = Path(tempfile.mkdtemp(prefix=".elf-", dir=built.parent))
        try:
            link(SOURCES / "program.c", unfinished / "program", older, "-s")
            link(LIBRARY, unfinished / "library", older, "-shared", "-fPIC", "-s")
            soname = "-Wl,-soname,libc.so.6"
            compile_c(SOURCES / "libc.c", unfinished / "libc", "-shared", "-fPIC", "-nostdlib", "-s", soname)
            unfinished.chmod(0o755)
            unfinished.rename(built)
        except OSError:
            if not built.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return built


def link(source: Path, output: Path, libc: Path, *options: str) -> None:
    """Build a program or a library that runs with the C library in the directory `libc`, and with newer ones."""
    libraries = [str(libc / name) for name in ("libdl.so.2", "libpthread.so.0", "libm.so.6", "libc.so.6")]
    flags = ["-O0", "-fno-stack-protector", "-nodefaultlibs", "-Wl,--no-as-needed", f"-Wl,-rpath-link,{libc}"]
    compile_c(source, output, *flags, after=[*options, *libraries, "-lgcc"])


def compile_c(source: Path, output: Path, *options: str, after: Sequence[str] = ()) -> None:
    """Run the C compiler. The arguments `after` come after the source."""
    command = ["cc", *options, "-o", str(output), str(source), *after]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "LC_ALL": "C"})


# --- NVIDIA's own programs --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Programs:
    """A driver root with NVIDIA's programs and libraries, as Debian installs them.

    `version` is, for example, 535.261.03.
    """

    root: Path
    version: str

    @property
    def branch(self) -> str:
        """The branch of the NVIDIA driver, such as R535."""
        return f"R{self.version.partition('.')[0]}"

    def library(self, name: str) -> Path:
        """Return the file of a library, such as libcuda."""
        return self.root / _LIBRARIES / f"nvidia/current/{name}.so.{self.version}"


def nvidia_programs() -> dict[str, Programs]:
    """Return the programs in the cache, by suite."""
    found = ((suite, _programs(_cached("nvidia", suite))) for suite in SUITES)
    return {suite: programs for suite, programs in found if programs is not None}


def _fetch_nvidia(suite: str) -> None:
    def make(top: Path) -> Path:
        return _as_installed(debian.unpack(_PACKAGES, suite, top / "tree", "non-free"))

    debian.keep(_cached("nvidia", suite), f"NVIDIA's programs of {suite}", make)


def _as_installed(tree: Path) -> Path:
    if _programs(tree) is None:
        raise ClusterError(f"Debian's libnvidia-ml1 has no library below {_LIBRARIES}.")
    links = {
        f"{_LIBRARIES}/{name}": f"/{_LIBRARIES}/nvidia/current/{name}"
        for name in ("libnvidia-ml.so.1", "libcuda.so.1")
    }
    for path, target in {"usr/bin/nvidia-smi": "/usr/lib/nvidia/current/nvidia-smi", **links}.items():
        # Absolute links through /etc/alternatives, like those of Debian's package nvidia-alternative.
        alternative = f"/etc/alternatives/nvidia--{Path(path).name}"
        for made, leads_to in ((tree / path, alternative), (tree / alternative[1:], target)):
            made.parent.mkdir(parents=True, exist_ok=True)
            made.symlink_to(leads_to)
    return tree


def _programs(root: Path) -> Programs | None:
    for path in sorted(root.glob(f"{_LIBRARIES}/nvidia/current/libnvidia-ml.so.*")):
        match = _VERSION.fullmatch(path.name)
        if match is not None:
            return Programs(root, match[1])
    return None


if __name__ == "__main__":
    sys.exit(main())
