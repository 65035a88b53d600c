"""Paths of the plugin's two sockets, and checks before binding one.

Too long names are hashed as in the Go helper library, so tools that know its names find our sockets.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from base64 import urlsafe_b64encode
from pathlib import Path

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.dataclass import dataclass

REGISTRY_DIR = Path("/var/lib/kubelet/plugins_registry")
PLUGINS_DIR = Path("/var/lib/kubelet/plugins")
MAX_PATH_BYTES = 107

_PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class SocketPaths:
    registrar: Path
    dra: Path


def socket_paths(driver: str, *, registry_dir: Path, plugin_dir: Path, pod_uid: str | None) -> SocketPaths:
    """Return the paths of both sockets. With a pod UID, two instances can run during a rolling update.

    Raises: InvalidConfigError if a directory's path is too long for any socket name.
    """
    return SocketPaths(
        registrar=_first_that_fits(registry_dir, _registrar_names(driver, pod_uid)),
        dra=_first_that_fits(plugin_dir, _dra_names(pod_uid)),
    )


def _registrar_names(driver: str, pod_uid: str | None) -> tuple[str, ...]:
    if pod_uid is None:
        return (f"{driver}-reg.sock",)
    both = _digest(f"{driver}\0{pod_uid}", 16)
    return (
        f"{driver}-{pod_uid}-reg.sock",
        f"{driver}-{_digest(pod_uid, 8)}-reg.sock",
        f"dra-{both}-reg.sock",
    )


def _dra_names(pod_uid: str | None) -> tuple[str, ...]:
    if pod_uid is None:
        return ("dra.sock",)
    # Even for the longest driver name, the last candidate fits into the default plugins directory.
    return (f"dra-{pod_uid}.sock", f"dra-{_digest(pod_uid, 8)}.sock", f"dra-{_digest(pod_uid, 6)}.sock")


def _digest(text: str, size: int) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).rstrip(b"=").decode()


def _first_that_fits(directory: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if len(os.fsencode(directory / name)) <= MAX_PATH_BYTES:
            return directory / name
    room = MAX_PATH_BYTES - 1 - len(names[-1])
    raise InvalidConfigError(
        f"directory {directory} is too long for the socket {names[-1]}: a socket path has at most "
        f"{MAX_PATH_BYTES} bytes; use a directory whose path has at most {room} bytes"
    )


def hidden_path(path: Path) -> Path:
    """Return where a socket is bound first. The kubelet ignores names that start with a dot.

    The hidden name is never longer than the final name, of which `dra.sock` is the shortest.
    """
    return path.with_name("." + _digest(path.name, 4))


def ensure_registry_dir(directory: Path) -> None:
    if not directory.is_dir():
        raise InvalidConfigError(
            f"kubelet registry directory {directory} does not exist; mount the host's directory at the same "
            f"path, or set another one with --kubelet-registrar-directory-path"
        )


def ensure_plugin_dir(directory: Path) -> None:
    """Create our own directory for root and its group. Raises: StateError."""
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(
            f"cannot create the plugin directory {directory}: {error.strerror}; check the mount, or set "
            f"another directory with --kubelet-plugins-directory-path"
        ) from error


def ensure_free(path: Path) -> None:
    """Raise StateError if the path has a file that is not a socket, or a socket on which a process still listens."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StateError(
            f"cannot read the socket path {path}: {error.strerror}; check the directory and its permissions"
        ) from error
    if not stat.S_ISSOCK(mode):
        raise StateError(f"{path} exists and is not a socket; move it, because the plugin must listen there")
    if listening(path):
        raise StateError(
            f"another process listens on {path}; stop it first, or set the pod UID, so that each "
            f"instance has its own sockets"
        )


def listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # queue full, no permission, or another socket type: a process owns it
    return True


def identity(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file at the path is replaced; None without a file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns)
