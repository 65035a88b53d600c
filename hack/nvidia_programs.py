#!/usr/bin/env python3
"""NVIDIA's own nvidia-smi, MPS programs, libnvidia-ml and libcuda, of each branch of the driver that Debian has.

They start without a GPU, so tests can hear what they say. They are NVIDIA's: nothing of them is committed, nor put into
an image or a release.

python3 hack/nvidia_programs.py    fetch what is missing; it is kept in the user's cache
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# The cluster beside us has what fetches packages.
sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from localcluster import debian, progress, shell
from localcluster.errors import ClusterError
from localcluster.layout import Layout

SUITES = ("bullseye", "bookworm", "trixie", "experimental")
"""Each has another branch of the driver."""

_PACKAGES = ("nvidia-cuda-mps", "nvidia-smi", "libnvidia-ml1", "libcuda1")
_LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
_VERSION = re.compile(r"libnvidia-ml\.so\.(\d+\.[\d.]+)")


@dataclass(frozen=True, slots=True)
class Programs:
    """A driver root with programs and libraries as Debian installs them, of one version such as 535.261.03."""

    root: Path
    version: str

    @property
    def branch(self) -> str:
        """Such as R535."""
        return f"R{self.version.partition('.')[0]}"

    def library(self, name: str) -> Path:
        """The file of a library such as libcuda."""
        return self.root / _LIBRARIES / f"nvidia/current/{name}.so.{self.version}"


def fetched() -> dict[str, Programs]:
    """What is in the cache, by suite."""
    found = ((suite, _programs(_folder(suite))) for suite in SUITES)
    return {suite: programs for suite, programs in found if programs is not None}


def why_missing() -> str:
    """One sentence for whoever does without."""
    if not _can_be_had():
        return "NVIDIA's own programs are fetched on Debian only"
    return "NVIDIA's own programs are not there; python3 hack/nvidia_programs.py says why"


def main() -> int:
    """Fetch what is missing; 1 if some of it cannot be had now."""
    if not _can_be_had():
        progress.say("This machine is not Debian: tests with NVIDIA's own programs are left out.")
        return 0
    missing = False
    for suite in SUITES:
        try:
            _fetch(suite)
        except ClusterError as error:
            missing = True
            progress.say(f"Tests go without NVIDIA's programs of {suite}: {' '.join(str(error).split())}")
    return int(missing)


def _fetch(suite: str) -> None:
    debian.keep(
        _folder(suite), f"NVIDIA's programs of {suite}", _PACKAGES, suite, _as_installed, component="non-free"
    )


def _as_installed(tree: Path) -> Path:
    if _programs(tree) is None:
        raise ClusterError(f"Debian's libnvidia-ml1 has no library below {_LIBRARIES}.")
    _link(tree, "usr/bin/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        _link(tree, f"{_LIBRARIES}/{name}", f"/{_LIBRARIES}/nvidia/current/{name}")
    return tree


def _link(tree: Path, path: str, target: str) -> None:
    """As update-alternatives does in a Debian that has the package nvidia-alternative: absolute, in two steps."""
    alternative = f"/etc/alternatives/nvidia--{Path(path).name}"
    for link, leads_to in ((tree / path, alternative), (tree / alternative[1:], target)):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(leads_to)


def _programs(root: Path) -> Programs | None:
    for path in sorted(root.glob(f"{_LIBRARIES}/nvidia/current/libnvidia-ml.so.*")):
        match = _VERSION.fullmatch(path.name)
        if match is not None:
            return Programs(root, match[1])
    return None


def _can_be_had() -> bool:
    return shell.find_program("apt-get") is not None and debian.is_debian()


def _folder(suite: str) -> Path:
    return Layout.from_environment().cache / "nvidia" / f"{suite}-{os.uname().machine}"


if __name__ == "__main__":
    sys.exit(main())
