"""JSON files of one kind in a directory, shared with a second instance of the plugin during a rolling update."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dra_driver.errors import StateError
from dra_driver.files.atomic import (
    NO_STAMP,
    QUARANTINE,
    UNREADABLE,
    Stamp,
    clear_abandoned,
    make_directory,
    read_plain,
    remove_file,
    set_aside,
    stamp_at,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.files.boots import begin_boot
from dra_driver.files.directory_watch import DirectoryWatch
from dra_driver.files.formats import NewerFormatError

T = TypeVar("T")

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file that this release cannot read, as it is told once.

    `name` is the file's name without its suffix. `kept_as` is where the file is now: under another name, or still in
    its place if only a newer release can read it, if the disk does not let it go, or if the store only reads.
    """

    name: str
    kept_as: Path
    reason: str
    is_newer: bool


class JsonStore(Generic[T]):
    """One value a file, by the file's name without its suffix.

    The disk is the truth, since a second instance may write it; a file is parsed again only when its stamp (inode,
    size, change time) differs. A file that cannot be read is set aside under another name and told once, or stays where
    the disk does not let it go; it never keeps the others from being served. One that only a newer release can read
    stays.
    """

    def __init__(
        self,
        directory: Path,
        what: str,
        decode: Callable[[str, bytes], T],
        tell: Callable[[UnreadableFile], None],
        *,
        is_name: Callable[[str], bool],
        only_reads: bool = False,
    ) -> None:
        """`what` names one file in errors. `decode` makes a value of a name and a content; it raises NewerFormatError,
        or StateError that says what is wrong. Files whose name `is_name` does not accept are somebody else's. A store
        that `only_reads` sets nothing aside."""
        self._directory = directory
        self._what = what
        self._decode = decode
        self._tell = tell
        self._is_name = is_name
        self._only_reads = only_reads
        self._cache: dict[str, tuple[Stamp, T]] = {}
        self._left: dict[str, Stamp] = {}
        self._lock = threading.Lock()
        self._watch = DirectoryWatch(directory)
        self._aside: set[str] = set()  # this and the next two are of `all`, under the lock of the index
        self._values: dict[str, T] = {}
        self._pending: set[str] = set()
        self._index_lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Where the value lies. The caller has checked the name."""
        return self._directory / f"{name}{_SUFFIX}"

    def get(self, name: str) -> T | None:
        """The value, None if there is none that can be read.

        Raises: NewerFormatError if only a newer release can read it; StateError.
        """
        return self._seen(name, self.path(name).stat)

    def all(self) -> dict[str, T]:
        """Every readable value by name. Raises: StateError if the directory cannot be listed."""
        with self._index_lock:
            is_new = False
            for name in self._to_look_at():
                value, may_pass = None, True
                try:
                    value = self.get(name)
                except NewerFormatError:
                    may_pass = False
                if value is None:
                    self._values.pop(name, None)
                    with self._lock:
                        self._cache.pop(name, None)
                        if name in self._left and not os.path.lexists(self.path(name)):
                            del self._left[name]
                else:
                    is_new |= name not in self._values
                    self._values[name] = value
                if not (may_pass and name in self._left):  # no event tells that a disk is well again
                    self._pending.discard(name)
            if is_new:
                self._values = dict(sorted(self._values.items()))
            return self._values.copy()

    def _to_look_at(self) -> set[str]:
        """The values whose files may have changed since `all` last read them. Raises: StateError."""
        try:
            changed, are_all = self._watch.look()
            if are_all:
                self._aside.clear()
                self._values.clear()
                with self._lock:
                    self._left = {
                        name: stamp for name, stamp in self._left.items() if f"{name}{_SUFFIX}" in changed
                    }
        except OSError as error:
            raise state_error(f"list the {self._what}s in", self._directory, error) from error
        for file in changed:
            name = file.removesuffix(_SUFFIX)
            if f"{_SUFFIX}{QUARANTINE}" in file:
                is_there = os.path.lexists(self._directory / file)
                (self._aside.add if is_there else self._aside.discard)(file)
            elif name != file and self._is_name(name):
                self._pending.add(name)
        return set(self._pending)

    def quarantined(self) -> list[Path]:
        """Files that could not be read: those that were set aside, and those that are still in their place."""
        with self._index_lock:
            with suppress(StateError):
                self._to_look_at()
            aside = [self._directory / file for file in self._aside]
        with self._lock:
            left = [self.path(name) for name in self._left]
        return sorted([*aside, *left])

    def save(self, name: str, content: bytes, *, durable: bool, whole: bool) -> None:
        """Replace the value's file, as `write_atomically`. Raises: StateError."""
        write_atomically(self.path(name), content, durable=durable, whole=whole)
        self._pending.add(name)
        # Two writes of one size within a tick of the clock may end with the same stamp.
        self.forget(name)

    def delete(self, name: str, *, durable: bool) -> None:
        """Remove the value's file, if there is one; `durable` has it stay removed after a power cut. Raises:
        StateError."""
        self.forget(name)
        was_there = remove_file(self.path(name))
        self._pending.add(name)  # some kernels tell of a removal a moment before it shows
        if was_there and durable:
            sync_removals(self._directory)

    def forget(self, name: str) -> None:
        """Read the file anew the next time."""
        with self._lock:
            self._cache.pop(name, None)

    def _seen(self, name: str, look: Callable[[], os.stat_result]) -> T | None:
        """As `get`; `look` is the status of the value's file."""
        path = self.path(name)
        try:
            stamp = stamp_at(path, look)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise state_error(f"read the {self._what}", path, error) from error
        with self._lock:
            cached = self._cache.get(name)
        if cached is not None and cached[0] == stamp != NO_STAMP:
            return cached[1]
        return self._load(name, path, stamp)

    def _load(self, name: str, path: Path, stamp: Stamp) -> T | None:
        try:
            value = self._decode(name, read_plain(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise state_error(f"read the {self._what}", path, error) from error
            reason = error.strerror or str(error)
        except NewerFormatError as error:
            with self._lock:
                is_news, self._left[name] = self._left.get(name) != stamp, stamp
            if is_news:
                self._tell(UnreadableFile(name, path, str(error), is_newer=True))
            raise
        except StateError as error:
            reason = str(error)
        else:
            with self._lock:
                self._cache[name] = (stamp, value)
                self._left.pop(name, None)
            return value
        self._set_aside(name, path, stamp, reason)
        return None

    def _set_aside(self, name: str, path: Path, stamp: Stamp, reason: str) -> None:
        """Keep the unreadable file for a person to look at, out of the way of the next value."""
        aside: Path | None = path
        with self._lock:
            try:
                if not self._only_reads:
                    aside = set_aside(path, self._what, stamp)
                    self._left.pop(name, None)
            except StateError as error:
                is_news, self._left[name] = self._left.get(name) != stamp, stamp
                aside, reason = path if is_news else None, f"{reason}; {error}"
        if aside is not None:
            self._tell(UnreadableFile(name, aside, reason, is_newer=False))


def open_directory(directory: Path, boot_id: str, torn: Callable[[str], None], *, durable: bool) -> None:
    """Create the directory of stores, and clear away what a killed writer left, and what a power cut tore of files that
    were not synced: their names go to `torn`. `durable` has the directory survive a power cut. Raises: StateError."""
    make_directory(directory, 0o700, durable=durable)
    clear_abandoned(directory)
    begin_boot(directory, boot_id, torn)
