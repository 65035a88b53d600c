"""Taking a device's processes and directories away; whatever of them is left, and any number of times."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from dra_driver.errors import RetryableError
from dra_driver.model.mps import MpsDirectories
from dra_driver.mps import processes
from dra_driver.mps.control import Control
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.mounts import Mounter


def end_users(control: Control, directories: MpsDirectories, patience_s: float) -> None:
    """End the control daemon and its servers: asked to quit, then by signal. Raises: RetryableError."""
    users = processes.users_of(directories.pipe)
    if not users:
        return
    if any(processes.is_control_daemon(user, directories.pipe) for user in users):
        with suppress(RetryableError):
            control.ask(directories, "quit", timeout_s=patience_s)
            processes.wait_gone(users, patience_s)
    processes.end(processes.users_of(directories.pipe), patience_s)
    for user in users:
        processes.reap(user.pid)
    left = processes.users_of(directories.pipe)
    if left:
        numbers = ", ".join(str(process.pid) for process in left)
        raise RetryableError(f"MPS processes of {directories.pipe} do not end: {numbers}")


def remove_directory(mounter: Mounter, layout: MpsLayout, device: str) -> None:
    """Remove a device's directory with what is mounted in it. Raises: RetryableError."""
    top = layout.directory(device)
    if not top.exists():
        return
    mounter.unmount(Path(layout.directories(device).shm))
    try:
        shutil.rmtree(top)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RetryableError(f"cannot remove {error.filename or top}: {error.strerror}") from error


def clear_directory(path: Path) -> None:
    """Remove what is in it. Raises: RetryableError."""
    try:
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise RetryableError(f"cannot clear {error.filename or path}: {error.strerror}") from error
