"""Wheels made on the host, because a build has no way to a package index."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from localcluster import progress, shell
from localcluster.errors import ClusterError

from imagebuild import places

_PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


def dependencies(python_version: str) -> Path:
    """A folder with the lock file, its wheels for that Python, and pip itself."""
    key = places.digest([places.REQUIREMENTS], more=(python_version, os.uname().machine))
    target = places.cache() / f"dependencies-{key}"
    if target.exists():
        return target
    with progress.step(f"wheels of requirements.txt for Python {python_version}"):
        unfinished = _fresh(target.with_suffix(".unfinished"))
        shutil.copy(places.REQUIREMENTS, unfinished / "requirements.txt")
        _download(unfinished, python_version)
        unfinished.replace(target)
    return target


def project() -> Path:
    """A folder with the driver's own wheel, built from a copy of its sources.

    The copy also decides the folder's name: an editor that saves meanwhile
    cannot put one state's wheel under another's name. And setuptools leaves
    build folders beside the sources, which thus stay out of the repository.
    """
    with tempfile.TemporaryDirectory() as folder:
        copies = _copy_sources(Path(folder))
        target = places.cache() / f"project-{places.digest(copies, base=Path(folder))}"
        if not target.exists():
            pip = _tools() / "bin" / "pip"
            with progress.step("the project's wheel"):
                unfinished = _fresh(target.with_suffix(".unfinished"))
                shell.run([pip, "wheel", "--no-deps", "--no-build-isolation", "-w", unfinished, folder])
                unfinished.replace(target)
    return target


def _copy_sources(folder: Path) -> list[Path]:
    copies = []
    for source in places.project_sources():
        copy = folder / source.relative_to(places.REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
        copies.append(copy)
    return copies


def _download(target: Path, python_version: str) -> None:
    pip: list[str | Path] = [_tools() / "bin" / "pip", "download", "--dest", target]
    machine = os.uname().machine
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    shell.run(
        [
            *pip,
            *("--only-binary=:all:", "--require-hashes", "--python-version", python_version),
            *platforms,
            *("--requirement", places.REQUIREMENTS),
        ]
    )
    shell.run([*pip, "--no-deps", "pip"])
    # Python runs a zip file's parts under any name; a fixed one needs no wildcard.
    next(target.glob("pip-*.whl")).rename(target / "pip.pyz")


def _tools() -> Path:
    """An environment with pip and what pyproject.toml asks for to build a wheel."""
    settings = tomllib.loads((places.REPOSITORY / "pyproject.toml").read_text())
    wanted: list[str] = settings["build-system"]["requires"]
    key = places.digest([], more=(sys.version, *wanted))
    target = places.cache() / f"tools-{key}"
    if (target / "ready").exists():
        return target
    with progress.step(f"tools for wheels: {' '.join(wanted)}"):
        _fresh(target)
        try:
            shell.run([sys.executable, "-m", "venv", target])
        except ClusterError as error:
            raise ClusterError(f"Python's venv does not work (package python3-venv?): {error}") from error
        shell.run([target / "bin" / "pip", "install", *wanted])
        (target / "ready").touch()
    return target


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
