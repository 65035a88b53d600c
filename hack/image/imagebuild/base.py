"""The base image: this machine's Debian release with Python and little else."""

from __future__ import annotations

import shutil
from pathlib import Path

from localcluster import debian, progress, shell

from imagebuild import places
from imagebuild.builder import Builder

_RECIPE = Path(__file__).resolve()
_SIGNS = {"debootstrap": "debootstrap"}
# What nobody reads in a container; apt's lists and caches make a third of the tree.
_NOT_NEEDED = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)


def ensure(builder: Builder) -> str:
    """Make the base image unless the builder has it; its name."""
    release = debian.own_release()
    recipe = places.digest([_RECIPE], more=[release])
    name = f"localhost/gpu-dra-driver-base:{recipe}"
    if not builder.has(name):
        debian.install_missing(_SIGNS)
        tree = places.cache() / "base-tree"
        with progress.step(f"base image: debootstrap {release}"):
            _make_tree(tree, release)
            builder.commit_tree(tree, name)
            shutil.rmtree(tree)
    return name


def python_version(builder: Builder, base: str) -> str:
    """The version of the base's python3 as pip wants to hear it, such as 3.11."""
    note = places.cache() / f"python-of-{base.rpartition(':')[2]}"
    if not note.exists():
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        note.write_text(builder.run_in(base, ["python3", "-c", code]).strip())
    return note.read_text()


def _make_tree(tree: Path, release: str) -> None:
    """Owned by root, without setuid programs: the driver never needs one.

    debootstrap mounts inside the tree; in a mount namespace of its own such a
    mount cannot outlive it, or an interrupted one be deleted through.
    """
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    options = ["--variant=minbase", "--include=python3"]
    shell.run(["unshare", "--mount", "debootstrap", *options, release, tree, debian.mirror(release)])
    for name in _NOT_NEEDED:
        folder = tree / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    shell.run(["find", tree, "-xdev", "-type", "f", "-perm", "/6000", "-exec", "chmod", "a-s", "{}", "+"])
