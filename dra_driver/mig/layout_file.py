"""The file with the layout state of each GPU, for the commands, which run in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dra_driver.base.atomic import read_plain, write_atomically
from dra_driver.base.fields import Codec, FileFormat
from dra_driver.errors import StateError
from dra_driver.model.mig import GpuLayout

LAYOUT_FILE = "mig-layout.json"
_SHAPE = Codec(GpuLayout)
_FILE: FileFormat[Sequence[GpuLayout]] = FileFormat(
    "MIG layout file",
    lambda document: tuple(map(_SHAPE.decode, document["gpus"])),
    lambda layouts: {"gpus": [_SHAPE.encode(one) for one in layouts]},
)
decode = _FILE.read
"""Raises: NewerFormatError, StateError."""


class LayoutFile:
    """Only reports what the GPUs have now, so it may replace the file of a newer release."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: bytes | None = None

    def load(self) -> Sequence[GpuLayout]:
        """Return the states that an earlier process wrote; empty if unreadable: the next check finds them again."""
        try:
            return decode(read_plain(self._path))
        except (OSError, StateError):
            return ()

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()

    def save(self, layouts: Sequence[GpuLayout]) -> None:
        """Write the file if its content changed. Raises: StateError."""
        content = _FILE.write(layouts)
        if content != self._written:
            write_atomically(self._path, content, durable=False)
            self._written = content
