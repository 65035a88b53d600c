"""Where the image build reads, keeps and leaves its files."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from localcluster.layout import Layout

REPOSITORY = Path(__file__).resolve().parents[3]
CONTAINERFILE = REPOSITORY / "daemonset" / "Containerfile"
REQUIREMENTS = REPOSITORY / "requirements-image.txt"
TOOLS_LOCK = REPOSITORY / "requirements-dev.txt"
PACKAGE = "dra_driver"
# What the project's wheel is made of; a licence or manifest file may be absent.
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")

IMAGE = "localhost/gpu-dra-driver:dev"
"""The image of the cluster of hack/cluster; released ones have the version as tag."""


def cache() -> Path:
    """The build's folder in the user's cache; it may be deleted at any time."""
    return Layout.from_environment().cache / "image"


def project_settings() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def project_sources() -> list[Path]:
    """The files that make up the project's wheel, in a stable order."""
    named = [REPOSITORY / name for name in PROJECT_FILES]
    inside = (REPOSITORY / PACKAGE).rglob("*")
    return [path for path in named if path.is_file()] + sorted(
        path for path in inside if path.is_file() and "__pycache__" not in path.parts
    )


def digest(paths: Iterable[Path], *, base: Path = REPOSITORY, more: Sequence[str] = ()) -> str:
    """A short name for the names below ``base`` and contents of files, and further words."""
    total = hashlib.sha256("\0".join(more).encode())
    for path in paths:
        total.update(f"\0{path.relative_to(base)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
