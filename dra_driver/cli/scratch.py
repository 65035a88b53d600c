"""Settings and a temporary directory for commands that leave nothing behind."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dra_driver.app.logs import configure_logs
from dra_driver.app.settings import DEFAULT_SIMULATOR_DIR, Settings, resolve
from dra_driver.errors import FatalError
from dra_driver.model.dataclass import replace


@contextmanager
def scratch_directory(purpose: str) -> Iterator[str]:
    """Yield a new directory. It is removed at the end, even if a thread still writes to it or a signal arrives.

    Also removes directories that killed commands left. Raises: FatalError.
    """
    try:
        _remove_left_ones(Path(tempfile.gettempdir()))
        made = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-")
    except OSError as error:
        raise FatalError(
            f"cannot create a temporary directory ({error.strerror or error}); set TMPDIR to one that is writable"
        ) from error
    try:
        with _locked(Path(made)):
            yield made
    finally:
        _remove(Path(made))


_REMOVES_FOR_S = 10.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _remove(directory: Path) -> None:
    """Retry while a thread that was left behind adds files; such a thread does not create the directory again."""
    former = {}
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        give_up_at = time.monotonic() + _REMOVES_FOR_S
        shutil.rmtree(directory, ignore_errors=True)
        while directory.exists() and time.monotonic() < give_up_at:
            time.sleep(0.02)
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


_PREFIX = "gpu-dra-tmp-"
"""Short, because the directory contains sockets of MPS daemons, and a socket path has at most 106 bytes."""
_YOUNG_S = 60.0
"""A younger directory may not be locked yet."""


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
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
    """Configure logs for people, and yield settings. Raises: like `resolve`; FatalError.

    A simulated machine without a directory is created in a new one, without saved state of the plugin.
    """
    configure_logs(log_level, "console")
    settings = resolve(given, config, {"node_name": this_machine()})
    if settings.simulate is None or settings.simulator_dir is not None:
        yield settings
        return
    with scratch_directory(purpose) as scratch:
        plugins = Path(scratch) / "plugins"
        plugins.mkdir()
        machine = str(Path(scratch) / "machine")
        yield replace(settings, simulator_dir=machine, kubelet_plugins_directory_path=str(plugins))


def node_settings(given: Namespace) -> Settings:
    """Configure logs for people, and return the settings. Raises: like `resolve`; StateError if the simulated
    machine does not exist.
    """
    configure_logs("critical", "console")
    settings = resolve(vars(given), given.config, {"node_name": "this-node"})
    if settings.simulate is None:
        return settings
    from dra_driver.simulator import require_machine

    directory = settings.simulator_dir or DEFAULT_SIMULATOR_DIR
    require_machine(Path(directory))
    return replace(settings, simulator_dir=directory)


def this_machine() -> str:
    return re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.") or "this-node"
