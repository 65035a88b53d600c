"""Settings and a temporary directory for commands that leave nothing behind."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra_driver.errors import FatalError

if TYPE_CHECKING:
    from dra_driver.app.settings import Settings


@contextmanager
def scratch_directory(purpose: str) -> Iterator[str]:
    """Yield the path of a new directory, which is removed at the end. Directories that killed commands left
    are removed first.

    Raises: FatalError if it cannot be created.
    """
    try:
        _remove_left_ones(Path(tempfile.gettempdir()))
        made = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-")
    except OSError as error:
        raise FatalError(
            f"cannot create a temporary directory ({error.strerror or error}); set TMPDIR to one that is writable"
        ) from error
    with made as path, _locked(Path(path)):
        yield path


_PREFIX = "gpu-dra-tmp-"
"""Short, because the directory contains sockets of MPS daemons, and a socket path has at most 106 bytes."""
_YOUNG_S = 60.0
"""A younger directory may not be locked yet: commands lock their directory just after they create it."""


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Yield whether this process holds the lock of a directory. The lock ends with the process."""
    descriptor = os.open(directory, os.O_RDONLY)
    is_mine = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        is_mine = False
    try:
        yield is_mine
    finally:
        os.close(descriptor)


def _remove_left_ones(where: Path) -> None:
    """Remove directories of killed commands, which no process has locked."""
    for left in where.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if left.is_dir() and time.time() - left.stat().st_mtime > _YOUNG_S:
                with _locked(left) as is_mine:
                    if is_mine:
                        shutil.rmtree(left)


@contextmanager
def scratch_settings(
    purpose: str, given: Mapping[str, Any], config: Path | None, log_level: str = "critical"
) -> Iterator[Settings]:
    """Configure logs for people, and yield settings as from `resolve`.

    By default the node has the name of this machine, and a simulated machine is kept in a new directory, without
    saved state of the plugin. Raises: like `resolve`; FatalError.
    """
    from dra_driver.app.logs import configure_logs
    from dra_driver.app.settings import resolve

    configure_logs(log_level, "console")
    with scratch_directory(purpose) as scratch:
        machine = str(Path(scratch) / "machine")
        settings = resolve(given, config, {"node_name": this_machine(), "simulator_dir": machine})
        if settings.simulate is not None and str(settings.simulator_dir) == machine:
            settings = replace(settings, kubelet_plugins_directory_path=str(Path(scratch) / "plugins"))
        yield settings


def node_settings(given: Namespace, node: str = "this-node") -> Settings:
    """Configure logs for people, and return the settings of a command for this node. Raises: like `resolve`."""
    from dra_driver.app.logs import configure_logs
    from dra_driver.app.settings import resolve

    configure_logs("critical", "console")
    return resolve(vars(given), given.config, {"node_name": node})


def this_machine() -> str:
    """Return the default name of the node: the host's name, made valid as a node name."""
    return re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.") or "this-node"
