"""The kinds of entries of the tree, and how to write them with as few writes as possible."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path


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
    """A character device. Without privileges it is a file that describes it."""

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
    """A directory that is kept equal to a set of entries. Foreign files in it are left alone."""

    def __init__(self, root: Path, *, real_nodes: bool) -> None:
        self.root = root
        self.real_nodes = real_nodes
        self._fresh = not root.exists()
        self._known_directories: set[str] = set()

    def sync(self, old: Entries | None, new: Entries, stale: list[str]) -> None:
        """Make it equal to `new`. With `old`, only the differences between both are written; without it, `new` is
        compared with the disk."""
        for path in stale if old is None else [path for path in old if path not in new]:
            if path not in new:
                self._remove(path, new)
        for path, entry in new.items():
            if old is not None:
                before = old.get(path)
                if before is entry or before == entry:
                    continue
            elif not self._fresh and self._is(path, entry):
                continue
            self._make(path, entry)

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _is(self, path: str, entry: Entry) -> bool:
        full = self._full(path)
        try:
            status = os.lstat(full)
        except OSError:
            return False
        mode = stat.S_IMODE(status.st_mode)
        if isinstance(entry, Node) and not self.real_nodes:
            entry = entry.described
        if isinstance(entry, Text):
            if not stat.S_ISREG(status.st_mode) or mode != entry.mode or status.st_size != len(entry.raw):
                return False
            with Path(full).open("rb") as file:
                return file.read() == entry.raw
        if isinstance(entry, Link):
            return stat.S_ISLNK(status.st_mode) and str(Path(full).readlink()) == entry.target
        if isinstance(entry, Node):
            same = stat.S_ISCHR(status.st_mode) and mode == entry.mode and status.st_gid == entry.gid
            return same and status.st_rdev == os.makedev(entry.major, entry.minor)
        if isinstance(entry, Socket):
            return stat.S_ISSOCK(status.st_mode) or stat.S_ISREG(status.st_mode)
        return stat.S_ISDIR(status.st_mode)

    def _make(self, path: str, entry: Entry) -> None:
        full = self._full(path)
        if isinstance(entry, Node) and not self.real_nodes:
            entry = entry.described
        if isinstance(entry, Directory):
            self._directory(full)
            os.chmod(full, entry.mode)  # noqa: PTH101
            return
        self._directory(full.rpartition("/")[0])
        new = full if self._fresh else f"{full}.new~"
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
            os.chmod(new, entry.mode)  # noqa: PTH101 - strings all along, this runs for every file
            if entry.gid:
                os.chown(new, 0, entry.gid)
        if self._fresh:  # no process looks yet, so nothing has to be replaced in one step
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
        full = self._full(path)
        _unlink(full)
        parent = path.rpartition("/")[0]
        while "/" in parent and parent not in keep:
            try:
                os.rmdir(self._full(parent))  # noqa: PTH106
            except OSError:
                return
            self._known_directories.discard(self._full(parent))
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
    """A socket file; a plain file if the path is too long for a socket address."""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
    except OSError:
        _write(path, b"", 0o666)


def can_make_nodes(directory: Path) -> bool:
    """Whether device nodes can be made here (privileges, and a file system that takes them)."""
    probe = directory / ".node-probe"
    try:
        os.mknod(probe, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except OSError:
        return False
    probe.unlink()
    return True
