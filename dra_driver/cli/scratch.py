"""A directory for a command that leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from dra_driver.errors import FatalError


@contextmanager
def scratch_directory(purpose: str) -> Iterator[str]:
    """The path of a fresh directory, removed at the end. Raises: FatalError if none can be made."""
    try:
        made = tempfile.TemporaryDirectory(prefix=f"gpu-dra-{purpose}-")
    except OSError as error:
        raise FatalError(
            f"no temporary directory can be made ({error.strerror or error}); set TMPDIR to one that is writable"
        ) from error
    with made as path:
        yield path
