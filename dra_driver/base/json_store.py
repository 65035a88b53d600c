"""JSON files of one kind in a directory, shared with a second instance of the plugin during a rolling update.

A store may skip syncing files whose content is only valid until the next boot. A power cut may damage such
files; the first start after a boot removes the damaged ones.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

from dra_driver.base.atomic import (
    NO_STAMP,
    QUARANTINE,
    UNREADABLE,
    Stamp,
    is_settled,
    make_directory,
    read_or_none,
    read_plain,
    remove_file,
    set_aside,
    stamp_at,
    stamp_of,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.base.fields import NewerFormatError
from dra_driver.errors import StateError
from dra_driver.model.problems import NodeProblem
from dra_driver.model.units import named

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_SUFFIX = ".json"


class FileInPlace(NamedTuple):
    """An unreadable file that still has its name. `newer` is the error if a newer release wrote the file."""

    stamp: Stamp
    newer: NewerFormatError | None

    @property
    def since(self) -> int:
        """When the file was last changed, in seconds since 1970."""
        return self.stamp[-1] // 10**9


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file that this release cannot read. Each file is reported once.

    `name` is the file name without its suffix. `kept_as` is the file's current path: a new name, or the old one
    if a newer release wrote the file, the disk refused the rename, or the store is read-only.
    """

    name: str
    kept_as: Path
    reason: str
    is_newer: bool


def log_unreadable(
    *, unreadable_event: str, name: str, remedy: str, newer: str | None = None
) -> Callable[[UnreadableFile], None]:
    """Return a function that logs an unreadable file as `unreadable_event`, with its name in the field `name`.

    The logged remedy is `newer` if only a newer release can read the file, and `remedy` otherwise.
    """

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
    """A directory with one value per file, keyed by file name without suffix. Thread-safe.

    A second instance may write the files, so the store does not trust its cache: it parses a file again if its
    stamp changed, and lists the directory again if the directory's time changed. An unreadable file is renamed
    and reported once, or left in place if the disk refuses; the other files are still served. A file written by
    a newer release has no value and is never overwritten.

    `what` names a file in errors. `decode` returns the value from a file's name and content; it raises
    NewerFormatError, or StateError that says what is wrong. Files whose name `is_name` rejects are ignored. With
    `only_reads`, the store renames nothing.
    """

    directory: Path
    what: str
    decode: Callable[[str, bytes], T]
    report: Callable[[UnreadableFile], None]
    _: KW_ONLY
    is_name: Callable[[str], bool]
    only_reads: bool = False

    def __post_init__(self) -> None:
        self._parsed: dict[str, tuple[Stamp, T]] = {}
        self._unread: dict[str, FileInPlace] = {}
        self._listed: tuple[int, int] | None = None
        self._values: dict[str, T] = {}  # `_values` and `_aside` come from the last listing
        self._aside: list[Path] = []
        self._lock = threading.RLock()
        self._is_closed = False

    def close(self) -> None:
        """Make every later use fail: another process works with the files now."""
        self._is_closed = True

    def path(self, name: str) -> Path:
        """Return the path of the value's file. Raises: StateError if `is_name` rejects the name, or after `close`."""
        self._refuse_closed()
        if not self.is_name(name):
            raise StateError(f"{name!r} is not a valid file name, so the {self.what} is rejected")
        return self.directory / f"{name}{_SUFFIX}"

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise StateError(
                f"this process has handed the {self.what}s over to another process of gpu-dra-driver"
            )

    def get(self, name: str) -> T | None:
        """Return the value; None if it is missing or unreadable. Raises: StateError."""
        with self._lock:
            try:
                stamp = stamp_at(self.path(name))
            except FileNotFoundError:
                self._forget(name)
                return None
            except OSError as error:
                wrong = state_error(f"read the {self.what}", self.path(name), error)
                if error.errno not in UNREADABLE:
                    raise wrong from error
                self._leave(name, NO_STAMP, str(wrong))
                return None
            parsed = self._parsed.get(name)
            return parsed[1] if parsed is not None and parsed[0] == stamp else self._load(name, stamp)

    def all(self) -> dict[str, T]:
        """Return every readable value by name. Raises: StateError if the directory cannot be listed."""
        with self._lock:
            self._refuse_closed()
            self._list()
            return self._values.copy()

    def quarantined(self) -> list[Path]:
        """Return the unreadable files found by the last `all` and by `get` since then, renamed or still in
        place.
        """
        with self._lock:
            return sorted([*self._aside, *map(self.path, self._unread)])

    def in_place(self) -> Mapping[str, FileInPlace]:
        """Return the unreadable files of `quarantined` that still have their names, by name. Reads no disk."""
        return self._unread.copy()

    def newer(self) -> Mapping[str, FileInPlace]:
        """Return the files that a newer release wrote, like `in_place`."""
        return {name: found for name, found in self.in_place().items() if found.newer is not None}

    def problems(self) -> Sequence[NodeProblem]:
        """Return one problem if there are files that a newer release wrote. Reads no disk."""
        newer = self.newer()
        if not newer:
            return []
        files = named([f"{name}{_SUFFIX}" for name in sorted(newer)])
        text = f"gpu-dra-driver cannot use {files} in {self.directory}: {newer[min(newer)].newer}"
        return [NodeProblem("newer-files", text, f"{self.directory}/{self.what}")]

    def write(self, name: str, content: bytes, *, durable: bool, whole: bool) -> None:
        """Replace the value's file, like `write_atomically`.

        Raises: StateError, also if `get` found that a newer release wrote the file, and the file is still there.
        """
        with self._lock:
            if name in self._unread:
                self.get(name)  # an administrator may have removed the file since
            left = self._unread.get(name)
            self._parsed.pop(name, None)
        if left is not None and left.newer is not None:
            raise StateError(f"cannot write {self.path(name)}: {left.newer}")
        write_atomically(self.path(name), content, durable=durable, whole=whole)

    def remove(self, name: str, *, durable: bool) -> bool:
        """Remove the value's file, whatever its content; returns whether it existed.

        `durable` makes the removal survive a power cut. Raises: StateError.
        """
        was_there = remove_file(self.path(name))
        if was_there and durable:
            sync_removals(self.directory)
        return was_there

    def _list(self) -> None:
        """Refresh all values from the directory. Raises: StateError."""
        try:
            status = os.stat(self.directory)  # noqa: PTH116
            listed = (status.st_ino, status.st_mtime_ns)
            if listed == self._listed:
                return
            is_last = is_settled(status.st_mtime_ns)
            found, aside = self._found()
        except OSError as error:
            raise state_error(f"list the {self.what}s in", self.directory, error) from error
        self._aside = aside
        for name in (self._parsed.keys() | self._unread.keys()) - found.keys():
            self._forget(name)
        self._values = {}
        for name in sorted(found):
            value = found[name]
            if value is None and self.is_name(name):
                value = self.get(name)
            if value is not None:
                self._values[name] = value
        # An unreadable file that is still in place may be readable next time, so list again.
        self._listed = listed if is_last and not self._unread else None

    def _found(self) -> tuple[dict[str, T | None], list[Path]]:
        """Return the cached value of each file by name (None: the file must be parsed), and the files that were
        set aside.

        Raises: OSError.
        """
        found: dict[str, T | None] = {}
        aside = []
        # Scan by descriptor: looking up the path of each file would be a third of the total cost.
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    file = entry.name
                    if file.endswith(_SUFFIX):
                        name = file.removesuffix(_SUFFIX)
                        parsed = self._parsed.get(name)
                        is_known = parsed is not None and _has_stamp(entry, parsed[0])
                        found[name] = parsed[1] if parsed is not None and is_known else None
                    elif f"{_SUFFIX}{QUARANTINE}" in file:
                        aside.append(self.directory / file)
        finally:
            os.close(descriptor)
        return found, aside

    def _forget(self, name: str) -> None:
        self._parsed.pop(name, None)
        self._unread.pop(name, None)

    def _load(self, name: str, stamp: Stamp) -> T | None:
        path, is_last = self.path(name), is_settled(stamp[-1])
        try:
            value = self.decode(name, read_plain(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise state_error(f"read the {self.what}", path, error) from error
            reason = error.strerror or str(error)
        except NewerFormatError as error:
            self._leave(name, stamp, str(error), error)
            return None
        except StateError as error:
            reason = str(error)
        else:
            self._forget(name)
            if is_last:
                self._parsed[name] = (stamp, value)
            return value
        self._set_aside(name, path, stamp, reason)
        return None

    def _set_aside(self, name: str, path: Path, stamp: Stamp, reason: str) -> None:
        """Rename an unreadable file, so that a person can inspect it and the next value can be written."""
        if self.only_reads:
            self._leave(name, stamp, reason)
            return
        try:
            aside = set_aside(path, self.what, stamp)
        except StateError as error:
            self._leave(name, stamp, f"{reason}; {error}")
            return
        self._forget(name)
        if aside is not None:
            self._aside.append(aside)
            self.report(UnreadableFile(name, aside, reason, is_newer=False))

    def _leave(self, name: str, stamp: Stamp, reason: str, newer: NewerFormatError | None = None) -> None:
        """Report an unreadable file that stays in place, once for each stamp."""
        before = self._unread.get(name)
        self._parsed.pop(name, None)
        self._unread[name] = FileInPlace(stamp, newer)
        if before is None or before.stamp != stamp:
            self.report(UnreadableFile(name, self.path(name), reason, is_newer=newer is not None))


def _has_stamp(entry: os.DirEntry[str], stamp: Stamp) -> bool:
    try:
        return stamp_of(entry.stat(follow_symlinks=False)) == stamp
    except OSError:
        return False  # the file is gone, or `get` reports what is wrong with it


def open_directory(directory: Path, boot_id: str, torn: Callable[[str], None], *, durable: bool) -> None:
    """Create the directory of a store, and remove unsynced files that a power cut damaged; `torn` gets their
    names.

    `durable` makes the directory survive a power cut. Raises: StateError.
    """
    make_directory(directory, 0o700, durable=durable)
    begin_boot(directory, boot_id, torn)


_MARKER = ".boot"
"""The boot ID of the last writes in the directory."""


def begin_boot(directory: Path, boot_id: str, torn: Callable[[str], None]) -> None:
    """Remove files that are not valid JSON, and call `torn` with their names without the suffix.

    This happens once per boot, before anything is written. Later in the boot, a damaged file stays, because no
    power cut can have damaged it.

    Raises: StateError.
    """
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
    """Whether the file is not valid JSON. Raises: OSError, RecursionError."""
    try:
        json.loads(read_plain(path))
    except ValueError:
        return True
    return False
