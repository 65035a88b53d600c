"""Files that are not synced, since all that they speak of ends with the boot: what a power cut tore of them is removed
by the first start of the next boot."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dra_driver.errors import StateError
from dra_driver.state.files import UNREADABLE, read_plain, state_error, write_atomically

_MARKER = ".boot"
"""The boot in which files of the directory were written last."""
_SUFFIX = ".json"


def begin_boot(directory: Path, boot_id: str, torn: Callable[[str], None]) -> None:
    """Once a boot, before anything is written: remove the files that are no JSON, and tell `torn` their names without
    the suffix. Later in the boot such a file was not torn by a power cut, and stays.

    Raises: StateError.
    """
    marker = directory / _MARKER
    before = _text_of(marker)
    if before == boot_id:
        return
    if before is not None:
        _clear_torn(directory, torn)
    with suppress(StateError):  # a disk that is full or read-only must not keep the driver from serving
        write_atomically(marker, boot_id.encode())


def _text_of(path: Path) -> str | None:
    """What a small file says, None if there is none that can be read. Raises: StateError."""
    try:
        return read_plain(path).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise state_error("read", path, error) from error


def _clear_torn(directory: Path, torn: Callable[[str], None]) -> None:
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        # What cannot be read or removed stays, and is told when it is looked for.
        with suppress(OSError, RecursionError):
            if _is_torn(path):
                path.unlink()
                torn(path.name.removesuffix(_SUFFIX))


def _is_torn(path: Path) -> bool:
    """Raises: OSError, RecursionError."""
    try:
        json.loads(read_plain(path))
    except ValueError:
        return True
    return False
