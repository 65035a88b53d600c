"""`make node-bundle`: writes build/gpu-node-bundle.tar.xz, which makes a machine a Kubernetes node without a network.

Unpack the archive on the machine, and start `run` in it (gpunode/run.py). The archive contains the cluster's programs,
the plugin with its dependencies for one or more versions of Python, the chart's objects and the examples. It contains
nothing of NVIDIA's: these programs and libraries are those of the machine.

python hack/gpunode/bundle.py [--python 3.12 …] [--preset 6]
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "hack" / "cluster"), str(ROOT / "hack")]

import localcluster  # noqa: E402
from localcluster import certificates, chart, debian, shell  # noqa: E402
from localcluster.components import Options  # noqa: E402
from localcluster.layout import Layout  # noqa: E402
from localcluster.shell import ClusterError  # noqa: E402

TARGET = ROOT / "build" / "gpu-node-bundle.tar.xz"
LIMIT_MIB = 48
_DICTIONARY = 256 << 20
"""Larger than the largest program, so that code which several programs contain is stored once."""
_PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
_PACKAGES = (
    "grpcio", "grpcio-health-checking", "markdown-it-py", "mdurl", "nvidia-ml-py", "prometheus-client", "protobuf",
    "pygments", "pyyaml", "rich", "shtab", "structlog", "typing-extensions", "urllib3",
)  # fmt: skip
"""Without the official client of Kubernetes, which only reads kubeconfigs, and without what that needs: 100 MB."""
_TREES = ("hack/cluster", "hack/gpunode", "dra_driver", "examples")
_NOT_NEEDED = shutil.ignore_patterns("__pycache__", "*.pyi", "tests", "test", "*.so.debug")
_LEXERS = "pygments/lexers/[a-z]*.py"
"""rich imports pygments, but the plugin's commands show no program text: a megabyte of the archive."""
_LAYOUT = str(ROOT / "hack/gpunode/layout")
_RUN = """#!/bin/sh
# Makes this machine a Kubernetes node for some minutes, and tries gpu-dra-driver on it; see `./run --help`.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec "${PYTHON:-python3}" -B "$here/hack/gpunode/run.py" "$@"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive, and return 1 if it is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="VERSION",
        help="a version of Python that the machine may have; 3.12 by default",
    )
    parser.add_argument("--preset", type=int, default=6, choices=range(10), help="of xz; 0 is fast and large")
    parsed = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(dir=_made(ROOT / "build")) as name:
            stage = Path(name, "gpu-node-bundle")
            _fill(stage, parsed.python or ["3.12"])
            with shell.step(f"{TARGET.relative_to(ROOT)}"):
                _pack(stage, parsed.preset)
    except ClusterError as error:
        shell.say(f"node-bundle: {error}")
        return 1
    size = TARGET.stat().st_size / 2**20
    print(f"{TARGET}: {size:.1f} MiB")
    if size > LIMIT_MIB and parsed.preset >= 6:
        shell.say(f"node-bundle: the archive has {size:.1f} MiB, but must not exceed {LIMIT_MIB} MiB")
        return 1
    return 0


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _fill(stage: Path, versions: Sequence[str]) -> None:
    """Create the content of the archive below `stage`."""
    mine = Layout.from_environment()
    theirs = Layout(state=stage, cache=stage / "cache" / mine.cache.name)
    debian.provide(mine.from_debian)
    for programs in (localcluster.build(), mine.from_debian):
        shutil.copytree(programs, theirs.cache / programs.relative_to(mine.cache), symlinks=True)
    for name in _TREES:
        shutil.copytree(ROOT / name, stage / name, ignore=_NOT_NEEDED)
    for version in versions:
        with shell.step(f"the plugin's dependencies for Python {version}"):
            _install(stage / "packages" / version, version)
    shutil.copy(ROOT / "hack/gpucheck.py", stage / "hack")
    (stage / "objects").mkdir()
    for name, values in (
        ("simulated", ("e2e", "node")),
        ("real", ("node",)),
        ("restricted", ("node", "node-restricted")),
        ("simulated-mig", ("e2e", "node", "e2e-mig")),
        ("real-mig", ("node", "e2e-mig")),
        ("simulated-layout", ("e2e", "node", _LAYOUT)),
        ("real-layout", ("node", _LAYOUT)),
    ):
        (stage / "objects" / f"{name}.yaml").write_text(chart.manifests(*values))
    # The machine may have no openssl. All servers listen on loopback or on a bridge of the machine's own, and the
    # certificates of each bundle are new.
    certificates.ensure(theirs, Options().addresses)
    (stage / "bin").mkdir()
    (stage / "bin" / "ip").symlink_to(os.path.relpath(theirs.from_debian / "busybox", stage / "bin"))
    (stage / "run").write_text(_RUN)
    (stage / "run").chmod(0o755)


def _install(target: Path, version: str) -> None:
    """Install the locked dependencies for a version of Python that this machine need not have."""
    locked = re.findall(r"^(\S+)(==.*(?:\n    .*)*)", (ROOT / "requirements-image.txt").read_text(), re.M)
    target.parent.mkdir(parents=True, exist_ok=True)
    wanted = target.with_suffix(".txt")
    wanted.write_text("".join(f"{name}{rest}\n" for name, rest in locked if name in _PACKAGES))
    machine = os.uname().machine
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--target", str(target)),
        *("--requirement", str(wanted)),
        *("--python-version", version, "--implementation", "cp"),
        *(word for platform in _PLATFORMS for word in ("--platform", f"{platform}_{machine}")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted.unlink()
    if done.returncode:
        raise ClusterError(f"installing packages for Python {version} failed: {done.stderr.strip()[-1500:]}")
    for lexer in target.glob(_LEXERS):
        lexer.unlink()


def _pack(stage: Path, preset: int) -> None:
    """Write the archive. Its largest files come first, so that the dictionary has all of the programs."""
    unfinished = TARGET.with_suffix(".unfinished")
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": _DICTIONARY}]
    if os.uname().machine == "x86_64":
        filters.insert(0, {"id": lzma.FILTER_X86})  # programs become a twentieth smaller
    files = sorted(
        stage.rglob("*"),
        key=lambda path: (0 if path.is_symlink() or not path.is_file() else -path.stat().st_size, path),
    )
    with (
        lzma.open(unfinished, "wb", filters=filters) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for path in files:
            if not path.is_dir() or path.is_symlink():
                archive.add(path, path.relative_to(stage.parent), filter=_anonymous)
    unfinished.replace(TARGET)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the entry without the builder's user."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


if __name__ == "__main__":
    sys.exit(main())
