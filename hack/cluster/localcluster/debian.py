"""Installs and downloads the Debian packages that the cluster, the image build and the tests of ELF programs need."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from localcluster import shell
from localcluster.shell import ClusterError

# Each key is a file or program of the package; if it exists, the package is installed.
COMPILER: Mapping[str, str] = {"cc": "gcc", "/usr/include/stdio.h": "libc6-dev"}
BUILD_PACKAGES: Mapping[str, str] = {
    "pkg-config": "pkgconf", "/usr/include/seccomp.h": "libseccomp-dev", **COMPILER,
}  # fmt: skip
CLUSTER_PACKAGES: Mapping[str, str] = {"ip": "iproute2", "mount": "mount"}
UNPACKED: Mapping[str, str] = {
    "bin/bash-static": "bash-static", "bin/busybox": "busybox-static",
    "usr/lib/cni/bridge": "containernetworking-plugins", "usr/lib/cni/host-local": "containernetworking-plugins",
}  # fmt: skip
"""Programs that a cluster needs, and their packages, which are not installed: a static busybox would replace the host's
ordinary one."""


def install_missing(packages: Mapping[str, str]) -> None:
    """Install missing packages with apt-get. Do nothing if all are installed."""
    missing = sorted({package for sign, package in packages.items() if not _present(sign)})
    if not missing:
        return
    if shell.find_program("apt-get") is None:
        raise ClusterError(
            f"apt-get is not available. Install these Debian packages, or the equivalent ones of your "
            f"distribution: {' '.join(missing)}."
        )
    shell.require_root(f"Installing {' '.join(missing)}")
    with shell.step(f"apt-get install {' '.join(missing)}"):
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *missing)


def provide(folder: Path) -> None:
    """Create `folder` with the programs of `UNPACKED`, unless it exists."""
    if not folder.exists():
        packages = sorted(set(UNPACKED.values()))
        release = own_release()
        keep(folder, ", ".join(packages), lambda top: _choose(unpack(packages, release, top / "tree")))


def _choose(tree: Path) -> Path:
    chosen = tree.with_name("chosen")
    chosen.mkdir()
    for path in map(Path, UNPACKED):
        [found, *_] = [one for one in (tree / path, tree / "usr" / path) if one.exists()]
        found.rename(chosen / path.name)
    return chosen


def own_release() -> str:
    """Return the code name of this machine's release, such as bookworm."""
    return _of_system("VERSION_CODENAME")


def mirror(release: str) -> str:
    """Return the URL from which this machine's apt gets packages of a release."""
    site = _sites().get(release)
    if site is None:
        raise ClusterError(f"apt has no package source for {release}.")
    return site


def sources(release: str) -> dict[str, str]:
    """Return this machine's package source for each suite of a release, with updates and security if it uses them."""
    mine, found = own_release(), _sites()
    more = {
        f"{release}{kind}": found[mine + kind] for kind in ("-updates", "-security") if mine + kind in found
    }
    return {release: mirror(mine), **more}


def is_debian() -> bool:
    """Whether this machine runs Debian itself, whose mirrors have all releases, not a derivative such as Ubuntu."""
    return _of_system("ID") == "debian"


def unpack(packages: Sequence[str], release: str, folder: Path, component: str = "main") -> Path:
    """Unpack packages of any release on this machine's mirror to the new directory ``folder``, and return it.

    This installs nothing, needs no root, and does not change apt's own lists. Raises: ClusterError if the mirror
    does not have the release, component or package, or if this machine does not have the key that signed it.
    """
    with tempfile.TemporaryDirectory() as name:
        options = _apart(Path(name), {release: mirror(own_release())}, component)
        _apt_get(*options, "update", "--error-on=any")
        _apt_get(*options, "download", *packages, folder=Path(name))
        folder.mkdir(parents=True)
        for file in sorted(Path(name).glob("*.deb")):
            shell.run(["dpkg-deb", "--extract", file, folder])
    return folder


def keep(target: Path, title: str, make: Callable[[Path], Path]) -> None:
    """Create ``target`` in the cache, unless it exists; of concurrent callers, only one creates it.

    ``make`` gets an empty folder, and returns the folder or file below it to keep.
    """
    with shell.exclusive(target.parent / "lock", wait=True):
        if target.exists():
            return
        with shell.step(title), tempfile.TemporaryDirectory(dir=target.parent) as top:
            make(Path(top)).rename(target)


def download(packages: Sequence[str], release: str, architecture: str, folder: Path) -> list[Path]:
    """Download packages of any release and architecture, with their dependencies, to ``folder``; return the files.

    Like `unpack`, this installs nothing. Raises: the errors of `unpack`.
    """
    with tempfile.TemporaryDirectory() as name:
        options = [
            *_apart(Path(name), sources(release)),
            f"--option=APT::Architecture={architecture}",
            f"--option=APT::Architectures={architecture}",
            "--option=APT::Install-Recommends=false",
            f"--option=Dir::Cache::archives={folder}",
        ]
        (folder / "partial").mkdir()
        _apt_get(*options, "update", "--error-on=any")
        _apt_get(*options, "install", "--yes", "--download-only", *packages)
    return sorted(folder.glob("*.deb"))


def _sites() -> dict[str, str]:
    """Return the package sources of this machine's apt, by suite such as bookworm and bookworm-security."""
    listed = shell.run(["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(SITE)"])
    rows = [line.split() for line in listed.splitlines()]
    return {found: site for kind, found, site in rows if kind == "Packages"}


def _apart(top: Path, sites: Mapping[str, str], component: str = "main") -> list[str]:
    """Return options that make apt use only these package sources, and keep its files below ``top``.

    They also disable this machine's preferences for versions and releases.
    """
    for directory in ("state/lists/partial", "cache/archives/partial"):
        (top / directory).mkdir(parents=True)
    (top / "status").touch()
    keys = f"/usr/share/keyrings/{_of_system('ID')}-archive-keyring.gpg"
    lines = [f"deb [signed-by={keys}] {site} {suite} {component}\n" for suite, site in sites.items()]
    (top / "sources.list").write_text("".join(lines))
    return [
        f"--option=Dir::State={top}/state",
        f"--option=Dir::State::status={top}/status",
        f"--option=Dir::Cache={top}/cache",
        f"--option=Dir::Etc::sourcelist={top}/sources.list",
        "--option=Dir::Etc::sourceparts=-",
        "--option=Dir::Etc::preferences=/dev/null",
        "--option=Dir::Etc::preferencesparts=/dev/null",
        "--option=APT::Default-Release=",
        "--option=Acquire::Languages=none",
        "--option=Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
        "--option=APT::Sandbox::User=root",
    ]


def _of_system(wanted: str) -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == wanted:
            return value.strip('"')
    raise ClusterError(f"/etc/os-release has no {wanted}: this needs Debian or a derivative.")


def _present(sign: str) -> bool:
    if sign.startswith("/"):
        return Path(sign).exists()
    return shell.find_program(sign) is not None


def _apt_get(*arguments: str, folder: Path | None = None) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", "--quiet", "--option=Acquire::Retries=5", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        verb = next(argument for argument in arguments if not argument.startswith("-"))
        raise ClusterError(f"apt-get {verb} failed: {done.stderr.strip()[-1500:]}")
