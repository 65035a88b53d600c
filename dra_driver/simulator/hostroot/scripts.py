"""The scripts that stand in for programs of the NVIDIA driver."""

from __future__ import annotations

import functools
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"


@functools.cache
def script(name: str) -> str:
    return (SCRIPTS / name).read_text()


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
