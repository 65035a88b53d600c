"""A directory on a disk whose cache is lost in a power failure: what may be there afterwards.

It records syncs and calls that change directories; it reads contents from the files themselves. The model is
more hostile than any journaling file system, and includes what ext4 and XFS may leave:

- A name shows any of the entries that it had since its directory was last synced, whatever other names show. So
  changes of one directory may be lost in any combination, a rename may be half done, and a sync of a file does not
  save its name, nor a sync of a directory the name of that directory.
- A file that changed since it was last synced is empty, truncated, complete, or as it was synced.

Temporary files, whose names begin with a dot, are either all gone or all present and empty, because nothing
reads them. After each change the model records the result if everything unsynced is lost, if nothing is, and
for some mixtures, which are the same in each run if one thread makes the changes. Threads make them one at a time.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

Tree = tuple[tuple[str, bytes | None], ...]
"""Paths below the disk's directory in order, each with its content; None is a directory."""

_MAX_BYTES = 1 << 20
_LONG_AGO = (1.0, 1.0)
_MIXTURES = 4
Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several things, the first of which is the oldest."""


@dataclass(eq=False)
class _File:
    descriptor: int
    synced: bytes | None = None

    def now(self) -> bytes:
        return os.pread(self.descriptor, _MAX_BYTES, 0)

    def after_loss(self) -> Sequence[bytes]:
        now = self.now()
        return [now] if now == self.synced else [self.synced or b"", b"", now[: len(now) // 2], now]


@dataclass(eq=False)
class _Directory:
    entries: dict[str, list[_Entry]] = field(default_factory=dict)

    def now(self, name: str) -> _Entry:
        return self.entries.get(name, [None])[-1]

    def change(self, name: str, entry: _Entry) -> None:
        self.entries.setdefault(name, [None]).append(entry)

    def sync(self) -> None:
        self.entries = {name: [past[-1]] for name, past in self.entries.items() if past[-1] is not None}


_Entry = _File | _Directory | None


class Disk:
    """The disk below `directory`. `volatile` are directories right below it that are in memory (a tmpfs is
    empty after a boot), or whose content does not matter. `losses` has what a power loss may leave, by what
    was promised until then.
    """

    def __init__(self, directory: Path, volatile: Collection[str] = ()) -> None:
        self._directory = directory
        self._volatile = volatile
        self._root = _Directory()
        self._descriptors: list[int] = []
        self._promise = "nothing"
        self._random = random.Random(0)
        self._guard = threading.RLock()
        self.losses: dict[str, set[Tree]] = {"nothing": set()}

    def promise(self, what: str) -> None:
        """From now on a power loss must leave this state."""
        self._promise = what
        self._note()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record changes of the disk, and after each change what a power loss would leave."""
        assert not list(self._directory.iterdir()), "what is there already would not be known"
        with pytest.MonkeyPatch.context() as patch:
            for name, noted in self._watched().items():
                patch.setattr(os, name, self._alone(noted))
            yield
        seen = {(path.relative_to(self._directory), path.is_dir()) for path in self._directory.rglob("*")}
        assert set(_current(self._root, Path())) == seen, "a change was made in a way that is not watched"
        for descriptor in self._descriptors:
            os.close(descriptor)

    def restore(self, tree: Tree) -> None:
        """The first boot after the power loss."""
        for path in self._directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, content in tree:
            path = self._directory / name
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
                os.utime(path, _LONG_AGO)
        for name, content in tree:
            if content is None:
                os.utime(self._directory / name, _LONG_AGO)

    # --- what is done --------------------------------------------------------------------------

    def _alone(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Let no other thread change the disk between the call and what the model records of it."""

        @wraps(change)
        def alone(*args: Any, **options: Any) -> Any:
            with self._guard:
                return change(*args, **options)

        return alone

    def _watched(self) -> Mapping[str, Callable[..., Any]]:
        real = {name: getattr(os, name) for name in _CHANGES}

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            descriptor: int = real["open"](path, flags, mode, dir_fd=dir_fd)
            place = self._place(path, dir_fd) if flags & os.O_CREAT else None
            if place is not None and place[0].now(place[1]) is None:
                reader = real["open"](path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
                self._descriptors.append(reader)
                place[0].change(place[1], _File(reader))
                self._note()
            return descriptor

        def renamed(source: Any, target: Any) -> None:
            real["replace"](source, target)
            self._move(source, target)

        def linked(source: Any, target: Any) -> None:
            real["link"](source, target)
            before, after = self._place(source), self._place(target)
            if before is not None and after is not None:
                after[0].change(after[1], before[0].now(before[1]))
                self._note()

        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            real["unlink"](path, dir_fd=dir_fd)
            self._change(path, dir_fd, None)

        def removed_directory(path: Any, *, dir_fd: int | None = None) -> None:
            place = self._place(path, dir_fd)
            real["rmdir"](path, dir_fd=dir_fd)
            if place is not None:
                place[0].change(place[1], None)
                self._note()

        def made_directory(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            real["mkdir"](path, mode, dir_fd=dir_fd)
            self._change(path, dir_fd, _Directory())

        def synced(descriptor: int) -> None:
            real["fsync"](descriptor)
            place = self._place(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
            entry = self._root if place is None else place[0].now(place[1])
            if isinstance(entry, _File):
                entry.synced = entry.now()
            elif isinstance(entry, _Directory):
                entry.sync()
            self._note()

        return {
            "open": opened, "replace": renamed, "rename": renamed, "link": linked, "unlink": removed,
            "remove": removed, "rmdir": removed_directory, "mkdir": made_directory, "fsync": synced,
        }  # fmt: skip

    def _move(self, source: Any, target: Any) -> None:
        before, after = self._place(source), self._place(target)
        if before is None or after is None:
            return
        after[0].change(after[1], before[0].now(before[1]))
        before[0].change(before[1], None)
        self._note()

    def _change(self, path: Any, dir_fd: int | None, entry: _Entry) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            place[0].change(place[1], entry)
            self._note()

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[_Directory, str] | None:
        """The directory and the name in it; None for what is elsewhere."""
        full = Path(path)
        if dir_fd is not None:
            full = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / full  # noqa: PTH115
        if full == self._directory or not full.is_relative_to(self._directory):
            return None
        *above, name = full.relative_to(self._directory).parts
        directory = self._root
        for part in above:
            below = directory.now(part)
            assert isinstance(below, _Directory), full
            directory = below
        return directory, name

    # --- what may be left ----------------------------------------------------------------------

    def _note(self) -> None:
        kept = _Directory({
            name: past for name, past in self._root.entries.items() if name not in self._volatile
        })  # fmt: skip
        ways: list[Choose] = [lambda things: things[0], lambda things: things[-1]]
        ways += [self._random.choice] * _MIXTURES
        self.losses.setdefault(self._promise, set()).update(_tree(kept, "", choose) for choose in ways)


_CHANGES = ("open", "replace", "link", "unlink", "rmdir", "mkdir", "fsync")


def _current(directory: _Directory, path: Path) -> Iterator[tuple[Path, bool]]:
    for name in directory.entries:
        entry = directory.now(name)
        if entry is not None:
            yield path / name, isinstance(entry, _Directory)
        if isinstance(entry, _Directory):
            yield from _current(entry, path / name)


def _tree(directory: _Directory, above: str, choose: Choose) -> Tree:
    """Return what a power loss leaves of a directory."""
    temporary: Tree = ()
    found: Tree = ()
    for name, past in directory.entries.items():
        path = f"{above}{name}"
        if name.startswith(".") and name != ".boot":
            temporary += ((path, b""),) if any(past) else ()
            continue
        entry = choose(past)
        if isinstance(entry, _File):
            found += ((path, choose(entry.after_loss())),)
        elif entry is not None:
            found += ((path, None), *_tree(entry, f"{path}/", choose))
    return tuple(sorted(found + choose([(), temporary]), key=lambda item: item[0]))
