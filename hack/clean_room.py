"""`make clean-room`: the README's first commands on machines that have nothing but what the README asks for.

A chroot of Debian 12 (Python 3.11) and one of Debian 13 (Python 3.13), each made anew by debootstrap with make, git and
Python's venv. In it a clone of the last commit runs `make demo`, and makes the context from which the image is built.

python hack/clean_room.py [bookworm] [trixie]    needs root, and some minutes
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hack" / "cluster"))

from localcluster import debian, progress, shell  # noqa: E402
from localcluster.errors import ClusterError  # noqa: E402

RELEASES = ("bookworm", "trixie")
_PACKAGES = "ca-certificates,git,make,python3,python3-venv"
_HOME = "root/gpu-dra-driver"
# How this machine reaches its package index; a variable may name a file.
_FILES = ("/etc/hosts", "/etc/pip.conf", "/etc/resolv.conf")
_VARIABLES = (
    "HTTPS_PROXY",
    "https_proxy",
    "NO_PROXY",
    "no_proxy",
    "PIP_CERT",
    "PIP_INDEX_URL",
    "SSL_CERT_FILE",
)
# In a mount namespace of its own: nothing is left mounted, and no tree is deleted through a mount.
_INSIDE = """
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot "$1" /bin/bash -euc "cd /$2; $3"
"""


def main(arguments: list[str]) -> int:
    """Run in each release; 1 if a command failed in one."""
    wanted = arguments or list(RELEASES)
    try:
        shell.require_root("A clean room")
        if unknown := set(wanted) - set(RELEASES):
            raise ClusterError(f"{', '.join(sorted(unknown))}: the clean rooms are {', '.join(RELEASES)}.")
        debian.install_missing({"debootstrap": "debootstrap"})
        failed = [release for release in wanted if not _passes(release)]
    except ClusterError as error:
        progress.say(f"clean-room: {error}")
        return 1
    if failed:
        progress.say(f"clean-room: failed in {', '.join(failed)}; the output is above.")
    return 1 if failed else 0


def commands() -> list[str]:
    """`make demo`, and the README's command that makes the build context."""
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    [demo] = {line for line in lines if line == "make demo"}
    [context] = {line for line in lines if "build.py context" in line}
    return [demo, context]


def _passes(release: str) -> bool:
    with tempfile.TemporaryDirectory(prefix=f"clean-room-{release}-") as folder:
        tree = Path(folder, "tree")
        with progress.step(f"{release}: debootstrap"):
            options = ["--variant=minbase", f"--include={_PACKAGES}"]
            shell.run(["unshare", "--mount", "debootstrap", *options, release, tree, _mirror()])
        _connect(tree)
        shell.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, tree / _HOME])
        return all(_runs(tree, release, command) for command in ("python3 --version", *commands()))


def _runs(tree: Path, release: str, command: str) -> bool:
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", _INSIDE]
    print(f"{release}$ {command}", flush=True)
    done = subprocess.run([*words, "inside", str(tree), _HOME, command], env=environment, check=False)
    return done.returncode == 0


def _connect(tree: Path) -> None:
    named = [os.environ[name] for name in _VARIABLES if os.environ.get(name, "").startswith("/")]
    for file in (*_FILES, *named, *_certificate_of_pip()):
        if Path(file).is_file():
            target = tree / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _certificate_of_pip() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.cert"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [done.stdout.strip()] if done.returncode == 0 else []


def _mirror() -> str:
    return debian.mirror(debian.own_release())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
