"""The files that a daemon and its clients share: a tmpfs that each of them sees at /dev/shm, and SELinux labels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from dra_driver.errors import RetryableError

T = TypeVar("T")

_log = structlog.get_logger(__name__)

SHM = "/dev/shm"  # noqa: S108 - where libc looks for POSIX shared memory

_NOSUID, _NODEV, _NOEXEC, _RELATIME = 2, 4, 8, 1 << 21
_BIND, _REC, _SLAVE = 4096, 16384, 1 << 19
_DETACH = 2
_CLONE_NEWNS = 0x20000


class KernelMounter:
    """Mounts with mount(2), and gives each daemon a mount namespace; needs CAP_SYS_ADMIN. Raises: RetryableError.

    A daemon's namespace keeps only its own mount below `root`: others would keep the memory of stopped daemons.
    """

    def __init__(self, root: Path, labels: SelinuxLabels) -> None:
        self._root = str(root)
        self._labels = labels
        self._libc = ctypes.CDLL(None, use_errno=True)

    def mount(self, path: Path) -> None:
        if is_tmpfs(path):
            return
        options = "mode=1777"
        context = self._labels.mount_option
        if context is not None:
            if self._mount_tmpfs(path, f"{options},{context}"):
                return
            self._labels.failed(f"cannot mount {path} with {context}: {os.strerror(ctypes.get_errno())}")
        if not self._mount_tmpfs(path, options):
            raise _failed(f"mount a tmpfs on {path}")

    def unmount(self, path: Path) -> None:
        while is_tmpfs(path):
            if self._libc.umount2(os.fsencode(path), _DETACH):
                raise _failed(f"unmount {path}")

    def within(self, path: Path, action: Callable[[], T]) -> T:
        """Run the action, and processes that it spawns, with `path` mounted at /dev/shm."""
        # Only the thread that enters the namespace moves to it, so a separate thread does this, and ends afterwards.
        with ThreadPoolExecutor(1, "mps-namespace") as own_thread:
            try:
                entered = own_thread.submit(self._enter, path)
            except RuntimeError as error:
                raise RetryableError(
                    f"cannot enter a mount namespace: {error}; raise the process limit"
                ) from error
            entered.result()
            return own_thread.submit(action).result()

    def _enter(self, path: Path) -> None:
        if self._libc.unshare(_CLONE_NEWNS):
            raise _failed("enter a mount namespace")
        # Slave propagation: later mounts of the host appear here, but not the reverse.
        if self._mount(None, "/", None, _REC | _SLAVE, None) or self._mount(
            os.fsencode(path), SHM, None, _BIND, None
        ):
            raise _failed(f"mount {path} on {SHM}")
        for mounted in _mounts_below(self._root):
            self._libc.umount2(mounted, _DETACH)

    def _mount_tmpfs(self, path: Path, options: str) -> bool:
        flags = _NOSUID | _NODEV | _NOEXEC | _RELATIME
        return self._mount(b"tmpfs", str(path), b"tmpfs", flags, options.encode()) == 0

    def _mount(
        self, source: bytes | None, target: str, kind: bytes | None, flags: int, data: bytes | None
    ) -> int:
        return int(self._libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), data))


class MountsWherePossible(KernelMounter):
    """Where the kernel does not allow mounts, clients and daemon do not share a tmpfs."""

    _logged = False

    def mount(self, path: Path) -> None:
        try:
            super().mount(path)
        except RetryableError as error:
            if not self._logged:
                _log.warning("mps_plain_shm", path=str(path), reason=str(error))
            self._logged = True

    def within(self, path: Path, action: Callable[[], T]) -> T:
        return super().within(path, action) if is_tmpfs(path) else action()


def is_tmpfs(path: Path) -> bool:
    try:
        return path.lstat().st_dev != path.parent.lstat().st_dev
    except OSError:
        return False


def _mounts_below(root: str) -> list[bytes]:
    """Return the most recent first, in the calling thread's namespace."""
    lines = Path("/proc/thread-self/mountinfo").read_bytes().splitlines()
    points = (line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines)
    prefix = os.fsencode(root) + b"/"
    return [point for point in points if point.startswith(prefix)][::-1]


def _failed(action: str) -> RetryableError:
    reason = os.strerror(ctypes.get_errno())
    return RetryableError(
        f"cannot {action}: {reason}; run the MPS host as root with CAP_SYS_ADMIN (in a pod: privileged), "
        "or allow plain directories with --allow-plain-shm"
    )


CONTAINER_FILE = "system_u:object_r:container_file_t:s0"
"""A label for files that every container can access; files inherit it from their directory."""

_ATTRIBUTE = "security.selinux"


def has_selinux(filesystems: Path = Path("/proc/filesystems")) -> bool:
    """Whether SELinux is on, enforcing or not. Containers have no /sys/fs/selinux, not even privileged ones."""
    try:
        return "selinuxfs" in filesystems.read_text().split()
    except OSError:
        return False


class SelinuxLabels:
    """Labels the files that containers share with MPS daemons. Does nothing without SELinux."""

    def __init__(
        self, *, enabled: bool, set_attribute: Callable[[Path, str, bytes], None] = os.setxattr
    ) -> None:
        self._enabled = enabled
        self._set = set_attribute
        self._logged = False

    @property
    def mount_option(self) -> str | None:
        return f'context="{CONTAINER_FILE}"' if self._enabled else None

    def label(self, path: Path) -> None:
        """Label, or log why not: clients still work if SELinux is permissive or has a policy for this."""
        if not self._enabled or _has_label(path):
            return
        try:
            self._set(path, _ATTRIBUTE, CONTAINER_FILE.encode())
        except OSError as error:
            self.failed(f"cannot label {path}: {error.strerror or error}")

    def failed(self, reason: str) -> None:
        if not self._logged:
            _log.warning("mps_not_labelled", label=CONTAINER_FILE, reason=reason)
        self._logged = True


def _has_label(path: Path) -> bool:
    try:
        return os.getxattr(path, _ATTRIBUTE).rstrip(b"\0") == CONTAINER_FILE.encode()
    except OSError:
        return False
