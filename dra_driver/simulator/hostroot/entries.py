"""The entries in the host root, and the tree that writes them with as few system calls as possible."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from pathlib import Path

from dra_driver.model.dataclass import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Text:
    content: str | bytes
    mode: int = 0o644

    @property
    def raw(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.encode()


@dataclass(frozen=True, slots=True)
class Link:
    target: str


@dataclass(frozen=True, slots=True)
class Node:
    """A character device, or, without privileges, a file that describes the device."""

    major: int
    minor: int
    mode: int = 0o666
    gid: int = 0

    @property
    def described(self) -> Text:
        return Text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class Socket:
    """A Unix socket on which no process listens."""


@dataclass(frozen=True, slots=True)
class Directory:
    mode: int = 0o755


Entry = Text | Link | Node | Socket | Directory
Entries = dict[str, Entry]


class Tree:
    """A directory that is kept equal to a set of entries. Other files in it are left alone."""

    def __init__(self, root: Path, *, real_nodes: bool) -> None:
        self.root = root
        self.real_nodes = real_nodes
        self._fresh = not root.exists()
        self._known_directories: set[str] = set()

    def sync(self, old: Entries | None, new: Entries, stale: list[str]) -> None:
        for path in stale if old is None else [path for path in old if path not in new]:
            if path not in new:
                self._remove(path, new)
        for path, entry in new.items():
            before = None if old is None else old.get(path)
            if before is not entry and before != entry:
                self._make(path, entry)

    def _make(self, path: str, entry: Entry) -> None:
        full = f"{self.root}/{path}"
        if isinstance(entry, Node) and not self.real_nodes:
            entry = entry.described
        if isinstance(entry, Directory):
            self._directory(full)
            os.chmod(full, entry.mode)  # noqa: PTH101
            return
        self._directory(full.rpartition("/")[0])
        # A new file is written elsewhere, because programs that list the directory would see it.
        new = full if self._fresh else f"{self.root}/.new~"
        if not self._fresh:
            _unlink(new)
        if isinstance(entry, Text):
            _write(new, entry.raw, entry.mode)
        elif isinstance(entry, Link):
            os.symlink(entry.target, new)  # noqa: PTH211
        elif isinstance(entry, Socket):
            _bind(new)
        else:
            os.mknod(new, stat.S_IFCHR | entry.mode, os.makedev(entry.major, entry.minor))
            os.chmod(new, entry.mode)  # noqa: PTH101 - strings for speed: runs for every file
            if entry.gid:
                os.chown(new, 0, entry.gid)
        if self._fresh:  # not in use yet, so no atomic replacement is needed
            return
        try:
            os.replace(new, full)  # noqa: PTH105
        except IsADirectoryError:
            shutil.rmtree(full)
            os.replace(new, full)  # noqa: PTH105

    def _directory(self, full: str) -> None:
        if full in self._known_directories and (self._fresh or os.path.isdir(full)):  # noqa: PTH112
            return
        os.makedirs(full, exist_ok=True)  # noqa: PTH103
        self._known_directories.add(full)

    def _remove(self, path: str, keep: Entries) -> None:
        full = f"{self.root}/{path}"
        _unlink(full)
        parent = path.rpartition("/")[0]
        while "/" in parent and parent not in keep:
            try:
                os.rmdir(f"{self.root}/{parent}")  # noqa: PTH106
            except OSError:
                return
            self._known_directories.discard(f"{self.root}/{parent}")
            parent = parent.rpartition("/")[0]


def _write(path: str, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        os.write(descriptor, content)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return
    except IsADirectoryError:
        try:
            os.rmdir(path)  # noqa: PTH106
        except OSError:
            return


def _bind(path: str) -> None:
    """Create a socket file, or a plain file if the path is too long for a socket address."""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
    except OSError:
        _write(path, b"", 0o666)


def can_make_nodes(directory: Path) -> bool:
    probe = directory / ".node-probe"
    try:
        os.mknod(probe, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except OSError:
        return False
    probe.unlink()
    return True
