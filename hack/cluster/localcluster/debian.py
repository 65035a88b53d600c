"""The Debian packages that the cluster, the image build and the tests of ELF programs need."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from localcluster import shell
from localcluster.shell import ClusterError

# A file or program that shows a package to be there, and the package.
COMPILER: Mapping[str, str] = {"cc": "gcc", "/usr/include/stdio.h": "libc6-dev"}
CLUSTER_PACKAGES: Mapping[str, str] = {
    "/bin/bash-static": "bash-static", "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/lib/cni/host-local": "containernetworking-plugins", "iptables": "iptables", "conntrack": "conntrack",
    "ip": "iproute2", "mount": "mount", "openssl": "openssl", "pkg-config": "pkgconf",
    "/usr/include/seccomp.h": "libseccomp-dev", **COMPILER,
}  # fmt: skip


def install_missing(packages: Mapping[str, str]) -> None:
    """Install missing packages with apt-get. Does nothing if all are installed."""
    missing = sorted({package for sign, package in packages.items() if not _present(sign)})
    if not missing:
        return
    if shell.find_program("apt-get") is None:
        raise ClusterError(
            f"These Debian packages (or their like) are missing and there is no apt-get "
            f"to install them: {' '.join(missing)}."
        )
    shell.require_root(f"Installing {' '.join(missing)}")
    with shell.step(f"apt-get install {' '.join(missing)}"):
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *missing)


def own_release() -> str:
    """The code name of this machine's own release, whose keys apt has."""
    return _of_system("VERSION_CODENAME")


def mirror(release: str) -> str:
    """The package source this machine's apt uses for its own release."""
    site = _sites().get(release)
    if site is None:
        raise ClusterError(f"apt has no package source for {release}.")
    return site


def sources(release: str) -> dict[str, str]:
    """By suite of a release the package source of this machine; of updates and security as far as it uses those."""
    mine, found = own_release(), _sites()
    more = {
        f"{release}{kind}": found[mine + kind] for kind in ("-updates", "-security") if mine + kind in found
    }
    return {release: mirror(mine), **more}


def is_debian() -> bool:
    """Whether this is Debian itself, whose mirror has all its releases, and none of its children."""
    return _of_system("ID") == "debian"


def unpack(packages: Sequence[str], release: str, folder: Path, component: str = "main") -> None:
    """Unpacks packages of any release on this machine's mirror to ``folder``, which is new.

    Installs nothing, needs no root, and does not change apt's own lists. Raises: ClusterError if the mirror
    has no such release, component or package, or if no key of this machine has signed it.
    """
    with tempfile.TemporaryDirectory() as name:
        options = _apart(Path(name), {release: mirror(own_release())}, component)
        _apt_get(*options, "update", "--error-on=any")
        _apt_get(*options, "download", *packages, folder=Path(name))
        folder.mkdir(parents=True)
        for file in sorted(Path(name).glob("*.deb")):
            shell.run(["dpkg-deb", "--extract", file, folder])


def keep(
    target: Path,
    title: str,
    packages: Sequence[str],
    release: str,
    arrange: Callable[[Path], Path],
    component: str = "main",
) -> None:
    """Caches what ``arrange`` creates from packages as ``target``; concurrent callers do so only once.

    ``arrange`` gets the folder of their files from `unpack`, and returns the folder or file to keep. Raises:
    the errors of `unpack`.
    """
    with shell.exclusive(target.parent / "lock", wait=True):
        if target.exists():
            return
        with shell.step(title), tempfile.TemporaryDirectory(dir=target.parent) as top:
            unpack(packages, release, Path(top, "tree"), component)
            arrange(Path(top, "tree")).rename(target)


def download(packages: Sequence[str], release: str, architecture: str, folder: Path) -> list[Path]:
    """The files of packages and of all that they need, of any release and architecture, in ``folder``; sorted.

    As with `unpack` nothing is installed. Raises: ClusterError as `unpack` does.
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
    """The package sources of this machine's apt by release, such as bookworm and bookworm-security."""
    listed = shell.run(["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(SITE)"])
    rows = [line.split() for line in listed.splitlines()]
    return {found: site for kind, found, site in rows if kind == "Packages"}


def _apart(top: Path, sites: Mapping[str, str], component: str = "main") -> list[str]:
    """Options with which apt knows only these package sources, and keeps all it has below ``top``.

    What this machine prefers among versions and releases does not count.
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
    raise ClusterError(f"/etc/os-release names no {wanted}: this needs Debian or its like.")


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
