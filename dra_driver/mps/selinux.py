"""SELinux labels: where the kernel has SELinux, containers may only open what bears the type of container files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

CONTAINER_FILE = "system_u:object_r:container_file_t:s0"
"""What every container may use, whatever categories it has. What is made in a directory inherits the directory's
type."""

_ATTRIBUTE = "security.selinux"


def has_selinux(filesystems: Path = Path("/proc/filesystems")) -> bool:
    """Whether SELinux is on in this kernel, enforcing or not. It is asked as libselinux asks: /sys/fs/selinux is not
    mounted in a container, not even a privileged one."""
    try:
        return "selinuxfs" in filesystems.read_text().split()
    except OSError:
        return False


class SelinuxLabels:
    """Labels what containers share with MPS daemons. Without SELinux nothing happens."""

    def __init__(
        self, *, enabled: bool, set_attribute: Callable[[Path, str, bytes], None] = os.setxattr
    ) -> None:
        self._enabled = enabled
        self._set = set_attribute
        self._told = False

    @property
    def mount_option(self) -> str | None:
        """The option that labels all of a mounted file system."""
        return f'context="{CONTAINER_FILE}"' if self._enabled else None

    def label(self, path: Path) -> None:
        """Have the file or directory labelled. If that fails, the log says so once, and MPS goes on: where SELinux is
        not enforcing, and with policies of the administrator's own, clients work all the same."""
        if not self._enabled or _has_label(path):
            return
        try:
            self._set(path, _ATTRIBUTE, CONTAINER_FILE.encode())
        except OSError as error:
            self.failed(f"cannot label {path}: {error.strerror or error}")

    def failed(self, reason: str) -> None:
        """Something could not be labelled."""
        if not self._told:
            _log.warning("mps_not_labelled", label=CONTAINER_FILE, reason=reason)
        self._told = True


def _has_label(path: Path) -> bool:
    """A file system that was mounted with the label shows it, and lets nobody set it."""
    try:
        return os.getxattr(path, _ATTRIBUTE).rstrip(b"\0") == CONTAINER_FILE.encode()
    except OSError:
        return False
