"""JSON files of one kind in a directory, kept in memory by the process that writes them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

from dra_driver.base.atomic import (
    QUARANTINE,
    UNREADABLE,
    make_directory,
    read_or_none,
    read_plain,
    remove_file,
    set_aside,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.base.fields import NewerFormatError
from dra_driver.errors import StateError
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.problems import NodeProblem
from dra_driver.model.units import named

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_SUFFIX = ".json"


class FileInPlace(NamedTuple):
    """An unreadable file that still has its name, and its last change in seconds since 1970."""

    since: int
    newer: NewerFormatError | None


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """`kept_as` is the file's current path: a new name, or the old one if a newer release wrote the file, the disk
    refused the rename, or the store is read-only.
    """

    name: str
    kept_as: Path
    reason: str
    is_newer: bool


def log_unreadable(
    *, unreadable_event: str, name: str, remedy: str, newer: str | None = None
) -> Callable[[UnreadableFile], None]:
    def log(found: UnreadableFile) -> None:
        _log.error(
            unreadable_event,
            reason=found.reason,
            kept_as=str(found.kept_as),
            remedy=newer if newer is not None and found.is_newer else remedy,
            **{name: found.name},
        )

    return log


@dataclass(eq=False)
class JsonStore(Generic[T]):
    """A directory with one value per file, keyed by file name without suffix. Thread-safe. Methods raise StateError.

    `load` reads all files into memory. From then on no other process writes them: a write changes the file, then
    memory, and only an unreadable file in place is read again when its value is needed. An unreadable file is renamed
    and reported once, or left in place if the disk refuses. A newer release's file has no value and is never
    overwritten.

    Without `load`, as in a command or for the files of another program, each call reads the disk and renames nothing.

    `decode` raises NewerFormatError or StateError. Files whose name `is_name` rejects are ignored. `having` finds
    values by their `keys`. Only one thread at a time writes or removes a value.
    """

    directory: Path
    what: str
    decode: Callable[[str, bytes], T]
    encode: Callable[[T], bytes]
    report: Callable[[UnreadableFile], None]
    _: KW_ONLY
    is_name: Callable[[str], bool]
    keys: Callable[[T], Collection[str]] = lambda _value: ()

    def __post_init__(self) -> None:
        self._is_loaded = False
        self._values: dict[str, T] = {}
        self._by_key: dict[str, dict[str, T]] = {}
        self._in_place: dict[str, FileInPlace] = {}
        self._aside: list[Path] = []
        self._reported: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        self._is_closed = False

    def close(self) -> None:
        """Make every later use fail: another process works with the files now."""
        self._is_closed = True

    def path(self, name: str) -> Path:
        self._refuse(name)
        return self.directory / f"{name}{_SUFFIX}"

    def _refuse(self, name: str | None = None) -> None:
        if self._is_closed:
            raise StateError(
                f"this process has handed the {self.what}s over to another process of gpu-dra-driver"
            )
        if name is not None and not self.is_name(name):
            raise StateError(f"{name!r} is not a valid file name, so the {self.what} is rejected")

    def load(self) -> None:
        with self._lock:
            self._is_loaded = False
            self._read_all(renames=True)
            self._is_loaded = True

    def get(self, name: str) -> T | None:
        self._refuse(name)
        with self._lock:
            if not self._is_loaded or name in self._in_place:
                self._read(name)  # an administrator may have removed an unreadable file since
            return self._values.get(name)

    def all(self) -> dict[str, T]:
        with self._lock:
            self._refuse()
            if not self._is_loaded:
                self._read_all()
            return self._values.copy()

    def having(self, keys: Iterable[str]) -> dict[str, T]:
        with self._lock:
            self._refuse()
            if not self._is_loaded:
                self._read_all()
            return {name: value for key in sorted(keys) for name, value in self._by_key.get(key, {}).items()}

    def quarantined(self) -> list[Path]:
        """Return the known unreadable files, renamed or in place. Reads no disk."""
        with self._lock:
            return sorted([*self._aside, *map(self.path, self._in_place)])

    def in_place(self) -> Mapping[str, FileInPlace]:
        return self._in_place.copy()

    def newer(self) -> Mapping[str, FileInPlace]:
        return {name: found for name, found in self.in_place().items() if found.newer is not None}

    def problems(self) -> Sequence[NodeProblem]:
        """Return one problem if there are files that a newer release wrote. Reads no disk."""
        newer = self.newer()
        if not newer:
            return []
        files = named([f"{name}{_SUFFIX}" for name in sorted(newer)])
        text = f"gpu-dra-driver cannot use {files} in {self.directory}: {newer[min(newer)].newer}"
        return [NodeProblem("newer-files", text, f"{self.directory}/{self.what}")]

    def write(self, name: str, value: T, *, durable: bool, whole: bool) -> None:
        """Replace the value's file, then the value."""
        path = self.path(name)
        with self._lock:
            self.get(name)
            left = self._in_place.get(name)
        if left is not None and left.newer is not None:
            raise StateError(f"cannot write {path}: {left.newer}")
        try:
            write_atomically(path, self.encode(value), durable=durable, whole=whole, permit=self._refuse)
        except StateError:
            with self._lock, suppress(StateError):
                self._read(name)  # the file may be replaced, but not synced
            raise
        with self._lock:
            self._set(name, value)

    def remove(self, name: str, *, durable: bool) -> bool:
        """Remove the value and its file, whatever its content; returns whether the file existed."""
        was_there = remove_file(self.path(name))
        with self._lock:
            self._set(name, None)
        if was_there and durable:
            sync_removals(self.directory)
        return was_there

    def _read_all(self, *, renames: bool = False) -> None:
        try:
            files = sorted(os.listdir(self.directory))  # noqa: PTH208  only names are needed
        except OSError as error:
            raise state_error(f"list the {self.what}s in", self.directory, error) from error
        self._values, self._by_key, self._in_place = {}, {}, {}
        self._aside = [self.directory / file for file in files if f"{_SUFFIX}{QUARANTINE}" in file]
        for name in (file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX)):
            if self.is_name(name):
                self._read(name, renames=renames)

    def _read(self, name: str, *, renames: bool = False) -> None:
        path, newer = self.path(name), None
        try:
            value = self.decode(name, read_plain(path))
        except FileNotFoundError:
            self._set(name, None)
            return
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise state_error(f"read the {self.what}", path, error) from error
            reason = error.strerror or str(error)
        except NewerFormatError as error:
            reason, newer = str(error), error
        except StateError as error:
            reason = str(error)
        else:
            self._set(name, value)
            return
        self._set(name, None)
        if newer is None and renames:
            try:
                if (aside := set_aside(path, self.what)) is not None:
                    self._aside.append(aside)
                    self.report(UnreadableFile(name, aside, reason, is_newer=False))
            except StateError as error:
                reason = f"{reason}; {error}"
            else:
                return
        self._in_place[name] = FileInPlace(_changed_at(path), newer)
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            self.report(UnreadableFile(name, path, reason, is_newer=newer is not None))

    def _set(self, name: str, value: T | None) -> None:
        self._in_place.pop(name, None)
        before = self._values.get(name)
        for key in () if before is None else self.keys(before):
            del self._by_key[key][name]
        if value is None:
            self._values.pop(name, None)
            return
        self._values[name] = value
        for key in self.keys(value):
            self._by_key.setdefault(key, {})[name] = value


def _changed_at(path: Path) -> int:
    try:
        return int(path.lstat().st_ctime)
    except OSError:
        return 0


_MARKER = ".boot"
"""The boot ID of the last writes in the directory."""


def open_directory(directory: Path, boot_id: str, torn: Callable[[str], None]) -> None:
    """Create the directory of a store durably. Remove files that are not valid JSON, and call `torn` with their names.

    A power cut may have damaged unsynced files, so this happens once per boot, before anything is written.
    """
    make_directory(directory, 0o700, durable=True)
    marker = directory / _MARKER
    before = read_or_none(marker)
    if before == boot_id.encode():
        return
    if before is not None:
        _clear_torn(directory, torn)
    with suppress(StateError):  # a full or read-only disk must not keep the plugin from serving
        write_atomically(marker, boot_id.encode())


def _clear_torn(directory: Path, torn: Callable[[str], None]) -> None:
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        # A file that cannot be read or removed stays; `get` reports it later.
        with suppress(OSError, RecursionError):
            if _is_torn(path):
                path.unlink()
                torn(path.name.removesuffix(_SUFFIX))


def _is_torn(path: Path) -> bool:
    try:
        json.loads(read_plain(path))
    except ValueError:
        return True
    return False
