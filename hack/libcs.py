#!/usr/bin/env python3
"""What tests of real ELF programs need: a C compiler, and the C libraries of the releases before and after this
machine's, as hosts have them.

python hack/libcs.py    install and fetch what is missing; the libraries are kept in the user's cache
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# The cluster beside us has what fetches packages.
sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from localcluster import debian, progress, shell
from localcluster.errors import ClusterError
from localcluster.layout import Layout

RELEASES = ("bullseye", "bookworm", "trixie", "forky")
"""In the order of their C libraries."""
FILES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")


def can_be_had() -> bool:
    """Whether this machine is one on which `main` can do its work."""
    return shell.find_program("apt-get") is not None and debian.own_release() in RELEASES


def older() -> Path | None:
    """The directory with the C library of the release before this machine's; None if it was not fetched."""
    return _cached(RELEASES[: RELEASES.index(debian.own_release())][-1:])


def newer() -> Path | None:
    """The same of the release after this machine's."""
    return _cached(RELEASES[RELEASES.index(debian.own_release()) + 1 :][:1])


def main() -> int:
    """Install and fetch what is missing; 1 if that fails."""
    if not can_be_had():
        progress.say(f"This machine is not Debian {', '.join(RELEASES)}: tests of ELF programs are left out.")
        return 0
    try:
        debian.install_missing(debian.COMPILER)
        _fetch_neighbours()
    except ClusterError as error:
        progress.say(str(error))
        return 1
    return 0


def _fetch_neighbours() -> None:
    """The programs are linked against the older one. The newer one may not be out yet, or signed with a newer key."""
    own = RELEASES.index(debian.own_release())
    if own > 0:
        _fetch(RELEASES[own - 1])
    for newer in RELEASES[own + 1 : own + 2]:
        try:
            _fetch(newer)
        except ClusterError as error:
            progress.say(f"Tests go without the C library of {newer}: {error}")


def _fetch(release: str) -> None:
    debian.keep(_folder(release), f"the C library of {release}", ["libc6"], release, _libraries)


def _libraries(tree: Path) -> Path:
    """The files of the C library beside one another."""
    found, chosen = next(tree.rglob("libc.so.6")), tree / "chosen"
    chosen.mkdir()
    for path in sorted(found.parent.iterdir()):
        if path.name in FILES or path.name.startswith("ld-linux"):
            shutil.copy(path, chosen / path.name)
    return chosen


def _cached(releases: tuple[str, ...]) -> Path | None:
    return next((_folder(release) for release in releases if _folder(release).is_dir()), None)


def _folder(release: str) -> Path:
    return Layout.from_environment().cache / "libc" / f"{release}-{os.uname().machine}"


if __name__ == "__main__":
    sys.exit(main())
