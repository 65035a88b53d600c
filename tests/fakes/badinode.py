"""A file whose inode the disk does not give back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def bad_inode(monkeypatch: pytest.MonkeyPatch, bad: Path, *, also_link: bool = True) -> None:
    """What asks for the status of the file gets EIO, and with `also_link` also what follows no link."""
    stat = Path.stat

    def broken(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == bad and (follow_symlinks or also_link):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", broken)
