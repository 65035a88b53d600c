"""From the repository's files to an image archive, when anything changed."""

from __future__ import annotations

import shutil
from pathlib import Path

from localcluster import debian, locking, progress, shell

from imagebuild import base, places, wheels
from imagebuild.builder import Builder

_SIGNS = {"buildah": "buildah"}


def archive() -> Path:
    """Build the image and return its docker archive; at once when it is current."""
    shell.require_root("Building the image")
    with locking.exclusive(places.cache() / "lock", wait=True):
        debian.install_missing(_SIGNS)
        builder = Builder.open(places.cache() / "store")
        base_image = base.ensure(builder)
        project = wheels.project()
        inputs = [places.CONTAINERFILE, places.REQUIREMENTS]
        key = places.digest(inputs, more=[base_image, project.name])
        target = places.cache() / f"gpu-dra-driver-{key}.tar"
        if not target.exists():
            _build(builder, base_image, project, target)
        return target


def context(folder: Path, python_version: str, project: Path | None = None) -> Path:
    """Make a build context for the Containerfile and any other builder."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"dependencies": wheels.dependencies(python_version), "project": project or wheels.project()}
    for name, source in parts.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(source, folder / name)
    return folder


def _build(builder: Builder, base_image: str, project: Path, target: Path) -> None:
    python_version = base.python_version(builder, base_image)
    folder = context(places.cache() / "context", python_version, project)
    arguments = {
        "BASE_IMAGE": base_image,
        "DEPENDENCIES_DIGEST": wheels.dependencies(python_version).name,
        "PROJECT_DIGEST": project.name,
    }
    with progress.step(f"image {places.IMAGE}"):
        builder.build(folder, places.CONTAINERFILE, places.IMAGE, arguments)
    with progress.step("image archive"):
        builder.save(places.IMAGE, target)
    _drop_old(builder, project, target)


def _drop_old(builder: Builder, project: Path, target: Path) -> None:
    """Keep one archive and one project wheel: each change of code makes new ones."""
    for path in places.cache().glob("gpu-dra-driver-*.tar"):
        if path != target:
            path.unlink()
    for path in places.cache().glob("project-*"):
        if path != project:
            shutil.rmtree(path)
    builder.prune()
