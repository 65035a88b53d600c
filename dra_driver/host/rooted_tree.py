"""Reads host files that may disappear at any time, and trees that symbolic links cannot leave."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from dra_driver.base.atomic import refuse_own_limit

_MAX_LINKS = 40
_MAY_RUN = 0o111


def text_of(path: Path | str) -> str:
    """Return the content; empty if the file cannot be read."""
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def names_in(directory: Path | str) -> tuple[str, ...]:
    """Return the sorted names; empty if the directory cannot be read."""
    try:
        return tuple(sorted(os.listdir(directory)))  # noqa: PTH208  avoids Path objects, because this runs every second
    except OSError:
        return ()


def join_root(root: str, path: str) -> str:
    return (root.rstrip("/") + path) or "/"


class RootedTree:
    """Looks up files below a root, which no link leaves, as in a chroot.

    Paths are absolute inside the tree. An instance caches resolved directories, so use it for one scan only.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._directories: dict[str, str | None] = {"/": "/"}

    def local(self, path: str) -> str:
        return (self._root + path) or "/"

    def resolve(self, path: str) -> str | None:
        """Resolve all links; None if there is no such file."""
        return self._resolve(path, _MAX_LINKS)

    def directory(self, path: str) -> str | None:
        return self._of_type(path, stat.S_ISDIR)

    def file(self, path: str) -> str | None:
        return self._of_type(path, stat.S_ISREG)

    def program(self, path: str) -> str | None:
        return self._of_type(path, lambda mode: stat.S_ISREG(mode) and bool(mode & _MAY_RUN))

    def file_or_socket(self, path: str) -> str | None:
        return self._of_type(path, lambda mode: stat.S_ISREG(mode) or stat.S_ISSOCK(mode))

    def entries(self, directory: str) -> Iterator[os.DirEntry[str]]:
        """Yield the entries of a resolved directory; none if it cannot be read. Raises: StateError if this process can
        open no files now.
        """
        try:
            with os.scandir(self.local(directory)) as entries:
                yield from entries
        except OSError as error:
            refuse_own_limit(self.local(directory), error)

    def _of_type(self, path: str, fits: Callable[[int], bool]) -> str | None:
        resolved = self.resolve(path)
        if resolved is None:
            return None
        try:
            return resolved if fits(os.lstat(self.local(resolved)).st_mode) else None
        except OSError:
            return None

    def _resolve(self, path: str, links_left: int) -> str | None:
        head, _, name = path.rstrip("/").rpartition("/")
        if not name:
            return "/"
        parent = self._resolve_directory(head or "/", links_left)
        if parent is None or name == ".":
            return parent
        if name == "..":
            return parent.rpartition("/")[0] or "/"
        here = f"{parent.rstrip('/')}/{name}"
        try:
            if not stat.S_ISLNK(os.lstat(self.local(here)).st_mode):
                return here
            target = str(Path(self.local(here)).readlink())
        except OSError:
            return None
        if links_left == 0:
            return None
        return self._resolve(target if target.startswith("/") else f"{parent}/{target}", links_left - 1)

    def _resolve_directory(self, path: str, links_left: int) -> str | None:
        if path not in self._directories:
            self._directories[path] = self._resolve(path, links_left)
        return self._directories[path]
