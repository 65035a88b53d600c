"""Wheels made on the host, because a build has no way to a package index.

What the image is made of is decided by its lock alone, and never by the Python that runs this: every package of the
lock is fetched for the Python and the processors of the image, without asking what else it needs. A test holds the
lock complete for all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from localcluster import progress, shell
from localcluster.errors import ClusterError

from imagebuild import places
from imagebuild.architectures import Architecture

_PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
_VERSION = re.compile(r"3\.\d+")
# setuptools gives what it writes itself the modes of who builds.
_BUILD = """
import os, sys
from setuptools import build_meta
os.umask(0o022)
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def dependencies(python_version: str, architectures: Sequence[Architecture]) -> Path:
    """A folder with the image's lock, its wheels for that Python and these processors, and pip itself."""
    if not _VERSION.fullmatch(python_version):
        raise ClusterError(f"--python-version {python_version}: write it as 3.13, with no third number.")
    names = [architecture.machine for architecture in architectures]
    key = places.digest([places.REQUIREMENTS, places.TOOLS_LOCK], more=(python_version, *names))
    target = places.cache() / f"dependencies-{key}"
    if target.exists():
        return target
    with progress.step(
        f"wheels of {places.REQUIREMENTS.name} for Python {python_version}, {', '.join(names)}"
    ):
        unfinished = _fresh(target.with_suffix(".unfinished"))
        shutil.copy(places.REQUIREMENTS, unfinished / "requirements.txt")
        for machine in names:
            _download(unfinished, python_version, machine)
        _download_pip(unfinished)
        unfinished.replace(target)
    return target


def project(epoch: int = 0) -> Path:
    """A folder with the driver's own wheel and source archive, built from a copy of its sources.

    The copy also decides the folder's name: an editor that saves meanwhile cannot put one state's wheel under
    another's name. And setuptools leaves build folders beside the sources, which thus stay out of the repository.
    ``epoch`` is the time of the files inside, in seconds; with the same sources it gives the same bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        copies = _copy_sources(Path(folder))
        key = places.digest([*copies], base=Path(folder), more=[str(epoch)])
        target = places.cache() / f"project-{key}"
        if not target.exists():
            python = _tools() / "bin" / "python"
            # Not before 1980, which a zip file cannot say.
            environment = {**os.environ, "SOURCE_DATE_EPOCH": str(max(epoch, 315532800))}
            with progress.step("the project's wheel"):
                unfinished = _fresh(target.with_suffix(".unfinished"))
                for kind in ("build_sdist", "build_wheel"):
                    shell.run([python, "-c", _BUILD, kind, unfinished], cwd=Path(folder), env=environment)
                unfinished.replace(target)
    return target


def _copy_sources(folder: Path) -> list[Path]:
    copies = []
    for source in places.project_sources():
        copy = folder / source.relative_to(places.REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        # The umask of who checked it out is no part of a release.
        copy.chmod(0o644)
        copies.append(copy)
    return copies


def _download(target: Path, python_version: str, machine: str) -> None:
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    shell.run(
        [
            *(*_pip_download(target), "--only-binary=:all:", "--require-hashes"),
            *("--implementation", "cp", "--python-version", python_version, *platforms),
            *("--requirement", places.REQUIREMENTS),
        ]
    )


def _download_pip(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shell.run([*_pip_download(target), "--require-hashes", "--requirement", _locked(Path(folder), "pip")])
    # Python runs a zip file's parts under any name; a fixed one needs no wildcard.
    next(target.glob("pip-*.whl")).rename(target / "pip.pyz")


def _pip_download(target: Path) -> list[str | Path]:
    # --no-deps: what a package needs besides, pip would decide by markers of the Python that runs it.
    return [
        _tools() / "bin" / "pip", "--disable-pip-version-check", "download", "--no-deps", "--dest", target,
    ]  # fmt: skip


def _locked(folder: Path, *names: str) -> Path:
    """A requirements file with the versions and hashes that the tools' lock has for these packages."""
    text = places.TOOLS_LOCK.read_text()
    found = []
    for name in names:
        entry = re.search(rf"^{re.escape(name)}==.*(?:\n[ ].*)*", text, re.MULTILINE)
        if entry is None:
            raise ClusterError(f"{places.TOOLS_LOCK.name} has no {name}: run make lock.")
        found.append(entry[0])
    file = folder / "requirements.txt"
    file.write_text("\n".join(found) + "\n")
    return file


def _tools() -> Path:
    """An environment with what pyproject.toml asks for to build a wheel, in the locked versions, and pip."""
    required: list[str] = places.project_settings()["build-system"]["requires"]
    names = ["pip", *(re.split(r"[^A-Za-z0-9._-]", entry)[0] for entry in required)]
    with tempfile.TemporaryDirectory() as folder:
        lock = _locked(Path(folder), *names)
        key = places.digest([lock], base=Path(folder), more=(sys.version, sys.executable))
        target = places.cache() / f"tools-{key}"
        if (target / "ready").exists():
            return target
        with progress.step(f"tools for wheels: {' '.join(names)}"):
            _fresh(target)
            try:
                shell.run([sys.executable, "-m", "venv", target])
            except ClusterError as error:
                raise ClusterError(f"Python's venv does not work (package python3-venv?): {error}") from error
            shell.run([target / "bin" / "python", "-m", "pip", "install", "--require-hashes", "-r", lock])
            (target / "ready").touch()
    return target


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
