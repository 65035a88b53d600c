"""The base layer: Debian packages, unpacked and never installed.

No program of the tree runs for that, so that a tree of another architecture is made in the same way, and root is not
needed. apt resolves what the packages need and checks their signatures. What their scripts would have written is
little, and stands in `_finish`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster import debian, progress, shell
from localcluster.errors import ClusterError

from imagebuild import architectures, places
from imagebuild.architectures import Architecture

_RECIPE = Path(__file__).resolve()
_DEBIAN_RELEASE = "trixie"
"""What users get from `python:3.13-slim` too; on Debian's children their own release."""

# The driver needs Python and, on simulated machines, a shell; the rest is for who looks into a pod.
_PACKAGES = (
    "base-files", "base-passwd", "bash", "coreutils", "dash", "findutils", "grep", "libstdc++6", "python3",
)  # fmt: skip

# What nobody reads in a container, and the parts of Python's library that only a desktop or Python's own tests need.
_NOT_NEEDED = (
    "usr/share/bug", "usr/share/debconf", "usr/share/info", "usr/share/lintian", "usr/share/locale",
    "usr/share/man", "usr/share/pixmaps", "usr/share/applications", "usr/lib/*/gconv",
    "usr/lib/python3*/ensurepip", "usr/lib/python3*/idlelib", "usr/lib/python3*/lib2to3",
    "usr/lib/python3*/pydoc_data", "usr/lib/python3*/test", "usr/lib/python3*/tkinter",
    "usr/lib/python3*/turtledemo",
)  # fmt: skip
_MERGED = ("bin", "lib", "lib64", "sbin")


@dataclass(frozen=True, slots=True)
class Base:
    """A root file system; ``packages`` are the control data of what is in it, by the package's name."""

    architecture: Architecture
    tree: Path
    packages: dict[str, dict[str, str]]

    @property
    def key(self) -> str:
        """Names the content."""
        return self.tree.parent.name

    @property
    def python_version(self) -> str:
        """The version of python3 as pip wants to hear it, such as 3.13."""
        return (self.tree / "usr" / "bin" / "python3").readlink().name.removeprefix("python")

    def compile(self, folder: Path, *, root: Path) -> None:
        """Write the bytecode of every module below ``folder``, which is at the same place of the image as below
        ``root``. Only for the base of this machine's architecture; the bytecode is that of all architectures.

        Modules and bytecode never part in an image, so that bytecode is never compared with its source.
        """
        tree, libraries = self.tree, self.architecture.libraries
        shell.run(
            [
                *(tree / "usr" / "lib" / libraries / self.architecture.loader, "--library-path"),
                f"{tree}/usr/lib/{libraries}",
                *(tree / "usr" / "bin" / "python3", "-S", "-m", "compileall", "-q", "-f"),
                *("--invalidation-mode", "unchecked-hash", "-s", root, "-p", "/", folder),
            ],
            env={"PYTHONHOME": str(tree / "usr"), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        )


def ensure(architecture: Architecture, *, newest: bool = False) -> Base:
    """The base of an architecture: as it was made before, or of the newest packages that the mirror has."""
    release = _release()
    kept = sorted(places.cache().glob(f"base-{architecture.name}-{release}-{_recipe()}-*/control"))
    if kept and not newest:
        return _read(architecture, kept[-1])
    own = architecture == architectures.own()
    compiler = None if own else ensure(architectures.own())
    downloads = places.cache() / f"packages-{architecture.name}.unfinished"
    with progress.step(f"base layer: packages of Debian {release} for {architecture.name}"):
        files = debian.download(_PACKAGES, release, architecture.name, _fresh(downloads))
    key = places.digest(files, base=downloads, more=[compiler.key if compiler else ""])
    folder = places.cache() / f"base-{architecture.name}-{release}-{_recipe()}-{key}"
    if not (folder / "control").exists():
        with progress.step(f"base layer for {architecture.name}"):
            _make(architecture, files, _fresh(folder), compiler)
    for control in kept:
        if control.parent != folder:
            shutil.rmtree(control.parent)
    shutil.rmtree(downloads)
    return _read(architecture, folder / "control")


def _recipe() -> str:
    return places.digest([_RECIPE], more=[])


def _release() -> str:
    return _DEBIAN_RELEASE if debian.is_debian() else debian.own_release()


def _read(architecture: Architecture, control: Path) -> Base:
    entries = [debian.control_fields(text) for text in control.read_text().split("\n\n") if text.strip()]
    packages = {entry["Package"]: entry for entry in entries}
    return Base(architecture, control.parent / "tree", packages)


def _make(architecture: Architecture, files: Sequence[Path], folder: Path, compiler: Base | None) -> None:
    tree = folder / "tree"
    for name in _MERGED:
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    # Permissions as they are packed: without root tar would drop the sticky bit of /tmp.
    options = "--keep-directory-symlink --no-same-owner --preserve-permissions"
    unpack = f'dpkg-deb --fsys-tarfile "$1" | tar --extract {options} --directory "$2"'
    for file in files:
        shell.run(["bash", "-o", "pipefail", "-c", unpack, "unpack", file, tree])
    _finish(tree, files)
    base = Base(architecture, tree, {})
    for library in tree.glob("usr/lib/python3*"):
        (compiler or base).compile(library, root=tree)
    # Last: who finds it finds a whole base.
    (folder / "control").write_text((tree / "var/lib/dpkg/status").read_text())


def _finish(tree: Path, files: Sequence[Path]) -> None:
    """What the packages' scripts would have done, as far as a container needs it."""
    for name in ("passwd", "group"):
        shutil.copy(tree / "usr/share/base-passwd" / f"{name}.master", tree / "etc" / name)
    nsswitch = tree / "usr/share/base-files/nsswitch.conf"
    if nsswitch.exists():
        shutil.copy(nsswitch, tree / "etc")
    if not (tree / "usr/bin/sh").exists():
        (tree / "usr/bin/sh").symlink_to("dash")
    # Scanners of images read here what is installed.
    status = [
        f"{shell.run(['dpkg-deb', '--field', file]).rstrip()}\nStatus: install ok installed\n"
        for file in files
    ]
    (tree / "var/lib/dpkg").mkdir(parents=True, exist_ok=True)
    (tree / "var/lib/dpkg/status").write_text("\n".join(status))
    for pattern in _NOT_NEEDED:
        for path in tree.glob(pattern):
            shutil.rmtree(path)
    for path in sorted((tree / "usr/share/doc").rglob("*"), reverse=True):
        # The licences stay: the image is handed on.
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.name != "copyright" and not path.is_symlink():
            path.unlink()
    if not (tree / "usr/bin/python3").is_symlink():
        raise ClusterError(
            "The package python3 has no link /usr/bin/python3: imagebuild/base.py must be adapted."
        )


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
