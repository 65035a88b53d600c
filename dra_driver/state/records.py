"""The claim records on disk: one file a claim, shared with a second instance during a rolling update."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from dra_driver.errors import StateError
from dra_driver.model.record import ClaimRecord
from dra_driver.state.boots import begin_boot
from dra_driver.state.codec import decode, encode
from dra_driver.state.files import (
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
    sync_directory,
    write_atomically,
)
from dra_driver.state.formats import NewerFormatError

_log = structlog.get_logger(__name__)

_SUFFIX = ".json"
_SAFE_UID = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\Z")


@dataclass(frozen=True, slots=True)
class _Cached:
    stamp: Stamp
    record: ClaimRecord


class RecordStore:
    """Records in `directory`, named by claim UID.

    The disk is the truth, since a second instance may write it; a file is parsed again only when its stamp
    (inode, size, change time) differs. A file that cannot be read is set aside under another name and
    reported once, or stays where the disk does not let it go; it never keeps the others from being served. One that
    only a newer release can read stays.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cache: dict[str, _Cached] = {}
        self._newer: dict[str, Stamp] = {}
        self._immovable: dict[str, Stamp] = {}
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path:
        """Where the records lie."""
        return self._directory

    def open(self, boot_id: str) -> None:
        """Create the directory, and clear away what a killed writer left, and what a power cut left of records that
        were not synced. Raises: StateError."""
        make_directory(self._directory, 0o700, durable=True)
        clear_abandoned(self._directory)
        begin_boot(self._directory, boot_id, lambda uid: _log.info("record_torn", claim_uid=uid))

    def get(self, uid: str) -> ClaimRecord | None:
        """The record of a claim, None if there is none that can be read.

        Raises: NewerFormatError if only a newer release can read it; StateError.
        """
        return self._seen(uid, self._path(uid).stat)

    def _seen(self, uid: str, look: Callable[[], os.stat_result]) -> ClaimRecord | None:
        """As `get`; `look` is the status of the record's file."""
        try:
            stamp = stamp_at(self._path(uid), look)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise state_error("read the claim record", self._path(uid), error) from error
        with self._lock:
            cached = self._cache.get(uid)
        if cached is not None and cached.stamp == stamp:
            return cached.record
        return self._load(self._path(uid), uid, stamp)

    def all(self) -> Mapping[str, ClaimRecord]:
        """Every readable record by claim UID. Raises: StateError if the directory cannot be listed."""
        records: dict[str, ClaimRecord] = {}
        try:
            with os.scandir(self._directory) as entries:
                found = [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        except OSError as error:
            raise state_error("list the claim records in", self._directory, error) from error
        for entry in sorted(found, key=lambda item: item.name):
            uid = entry.name.removesuffix(_SUFFIX)
            record = None
            with suppress(NewerFormatError):
                record = self._seen(uid, entry.stat) if _SAFE_UID.fullmatch(uid) else None
            if record is not None:
                records[uid] = record
        there = {entry.name.removesuffix(_SUFFIX) for entry in found}
        with self._lock:
            for uid in self._cache.keys() - records.keys():
                del self._cache[uid]
            there -= records.keys()
            self._newer = {uid: stamp for uid, stamp in self._newer.items() if uid in there}
            self._immovable = {uid: stamp for uid, stamp in self._immovable.items() if uid in there}
        return records

    def quarantined(self) -> list[Path]:
        """Files that could not be read: those that were set aside, or could not be, and those that only a newer release
        can read."""
        with self._lock:
            left = [self._path(uid) for uid in {*self._newer, *self._immovable}]
        return sorted([*self._directory.glob(f"*{_SUFFIX}{QUARANTINE}*"), *left])

    def save(self, record: ClaimRecord, *, durable: bool = True, whole: bool = True) -> None:
        """Write the record; `durable` makes it survive a power cut, `whole` has one leave this version or the one
        before; with neither there may be a torn file, which the first `open` of the next boot removes. Raises:
        StateError."""
        write_atomically(self._path(record.ref.uid), encode(record), durable=durable, whole=whole)

    def delete(self, uid: str) -> None:
        """Remove a claim's record; nothing happens if there is none. Raises: StateError."""
        path = self._path(uid)
        with self._lock:
            self._cache.pop(uid, None)
        try:
            if remove_file(path):
                # A record that came back after a power cut would hold its devices for ever.
                sync_directory(self._directory)
        except OSError as error:
            raise state_error("remove the claim record", path, error) from error

    def _path(self, uid: str) -> Path:
        """Raises: StateError for a UID that could lead out of the directory."""
        if not _SAFE_UID.fullmatch(uid):
            raise StateError(f"claim UID {uid!r} is not usable as a file name; the claim is refused")
        return self._directory / f"{uid}{_SUFFIX}"

    def _load(self, path: Path, uid: str, stamp: Stamp) -> ClaimRecord | None:
        try:
            record = decode(read_plain(path))
            if record.ref.uid != uid:
                raise StateError(f"it is the record of claim UID {record.ref.uid}")
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise state_error("read the claim record", path, error) from error
            self._set_aside(path, uid, stamp, error.strerror or str(error))
            return None
        except NewerFormatError as error:
            with self._lock:
                is_news, self._newer[uid] = self._newer.get(uid) != stamp, stamp
            if is_news:
                self._tell_newer(path, uid, str(error))
            raise
        except StateError as error:
            self._set_aside(path, uid, stamp, str(error))
            return None
        with self._lock:
            self._cache[uid] = _Cached(stamp, record)
        return record

    def _tell_newer(self, path: Path, uid: str, reason: str) -> None:
        _log.error(
            "record_unreadable",
            claim_uid=uid,
            reason=reason,
            kept_as=str(path),
            remedy="the claim is refused and its devices are kept until that release is installed again; to give "
            "them up for good, remove the file",
        )

    def _set_aside(self, path: Path, uid: str, stamp: Stamp, reason: str) -> None:
        """Keep the unreadable file for a person to look at, out of the way of the claim's next record."""
        with self._lock:
            try:
                aside = set_aside(path, "claim record", stamp)
                self._immovable.pop(uid, None)
            except StateError as error:
                is_news, self._immovable[uid] = self._immovable.get(uid) != stamp, stamp
                aside, reason = path if is_news else None, f"{reason}; {error}"
        if aside is None:
            return
        _log.error(
            "record_unreadable",
            claim_uid=uid,
            reason=reason,
            kept_as=str(aside),
            remedy="the claim can be prepared and unprepared anew; remove the file when it was looked at",
        )
