"""Reading what may be missing: files and directories of the host that come and go."""

from __future__ import annotations

import os
from pathlib import Path


def text_of(path: Path | str) -> str:
    """The content of a text file; empty if it cannot be read."""
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def names_in(directory: Path | str) -> tuple[str, ...]:
    """The names in a directory, sorted; none if it cannot be read."""
    try:
        return tuple(sorted(os.listdir(directory)))  # noqa: PTH208  no Path objects wanted every second
    except OSError:
        return ()
