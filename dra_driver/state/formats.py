"""The version of a file's format, and what becomes of a file that only a newer release can read.

The number is raised when a file can no longer be read as before; a field that is added needs no new number, since
releases that do not know it keep it. So a file of a higher number is read if it can be. If it cannot, it stays where
it is for the release that wrote it, and what it speaks of is refused until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra_driver.errors import StateError


class NewerFormatError(StateError):
    """A file that only a newer release can read."""


def check_version(document: Mapping[str, Any]) -> None:
    """Raises: StateError if the version is none."""
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise StateError(f"format version {version!r} is unknown")


def is_newer(document: object, known: int) -> bool:
    """Whether the document says that its format has a higher version than `known`."""
    version = document.get("version") if isinstance(document, Mapping) else None
    return isinstance(version, int) and version > known


def of_newer_release(what: str, version: object, reason: str) -> NewerFormatError:
    """The error in one sentence; `reason` is what this release stumbled over."""
    return NewerFormatError(
        f"{what} has format version {version} of a newer release of the driver, which this one cannot read "
        f"({reason}); install that release again"
    )
