"""Stores the layout state of each GPU in a file for the commands, because they run in other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dra_driver.base.atomic import read_plain, write_atomically
from dra_driver.base.fields import Codec, parse_file
from dra_driver.errors import StateError
from dra_driver.model.mig import GpuLayout

LAYOUT_FILE = "mig-layout.json"
_FORMAT_VERSION = 1
_SHAPE = Codec(GpuLayout)


class LayoutFile:
    """The layout file. The leading instance writes it when the content changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: bytes | None = None

    def load(self) -> tuple[GpuLayout, ...]:
        """Returns the states that an earlier instance of the plugin wrote. Empty if the file cannot be read, because
        the next check finds the states again.
        """
        try:
            return decode(read_plain(self._path))
        except (OSError, StateError):
            return ()

    def remove(self) -> None:
        """Removes the file, because the node no longer has a layout."""
        with suppress(OSError):
            self._path.unlink()

    def save(self, layouts: Sequence[GpuLayout]) -> None:
        """Writes the file if its content changed. Raises: StateError."""
        document = {"version": _FORMAT_VERSION, "gpus": [_SHAPE.encode(one) for one in layouts]}
        content = json.dumps(document, separators=(",", ":")).encode()
        if content != self._written:
            write_atomically(self._path, content, durable=False)
            self._written = content


def decode(content: bytes) -> tuple[GpuLayout, ...]:
    """Parses the content of the file. Raises: NewerFormatError, StateError."""
    return parse_file(
        content,
        "MIG layout file",
        lambda document: tuple(map(_SHAPE.decode, document["gpus"])),
        known=_FORMAT_VERSION,
    )
