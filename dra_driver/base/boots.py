"""Files that are not synced, because what they describe ends with the boot. A power cut may tear them; the first start
of the next boot removes those."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dra_driver.base.atomic import read_or_none, read_plain, write_atomically
from dra_driver.errors import StateError

_MARKER = ".boot"
"""The boot in which files of the directory were written last."""
_SUFFIX = ".json"


def begin_boot(directory: Path, boot_id: str, torn: Callable[[str], None]) -> None:
    """Remove the files that are not JSON, and call `torn` with their names without the suffix.

    That happens once a boot, before anything is written: later in the boot a power cut cannot be the cause, and such a
    file stays.

    Raises: StateError.
    """
    marker = directory / _MARKER
    before = read_or_none(marker)
    if before == boot_id.encode():
        return
    if before is not None:
        _clear_torn(directory, torn)
    with suppress(StateError):  # a disk that is full or read-only must not keep the plugin from serving
        write_atomically(marker, boot_id.encode())


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
