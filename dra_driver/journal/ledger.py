"""The ledger of each GPU: what the plugin has set or made there, and for which claims. One JSON file a GPU, shared with
a second instance of the plugin during a rolling update.

    (nothing) ──written, then the step is done──▶ entry ──its claim ends──▶ pending cleanup ──undone──▶ (nothing)

An entry is a step whose undo needs a tool, a daemon or the silicon. It is *pending cleanup* as long as no record names
its step: so a claim ends by the removal of its record, which needs no space on a full disk.

| A crash … | leaves | and then |
|---|---|---|
| before the entry is written | the record | Prepare goes on, or Unprepare removes the record |
| between the entry and the end of the step | record and entry | the same; an undo finds little or nothing to do |
| after the record is removed, or in an undo | the entry | it is pending cleanup, and the loop of `cleaner` undoes it |
| before the entry is removed | the entry | an undo runs again |

Only the lane of a GPU writes its file; a step that changes several GPUs is in the file of the first one. The records
are read after the ledgers: a claim whose record is written in between would else seem to have ended.

A reboot undoes everything but the directories of MPS daemons, so all other entries of an older boot are void. A claim
that has an unreadable record, or none, holds what its entries say until its CDI spec is removed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from dra_driver.base.fields import NUMBER, TEXT, Shape, encode_file, left_out, list_of, needed, parse_file
from dra_driver.base.json_store import JsonStore, UnreadableFile, open_directory
from dra_driver.errors import StateError
from dra_driver.journal.record_codec import REF, STEP
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import (
    LedgerEntry,
    PendingCleanup,
    counts,
    gpus_of,
    has_ended,
    is_undone_in_lane,
    pending_cleanups,
)
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, Step

_log = structlog.get_logger(__name__)

DIRECTORY = "ledger"
"""Below the plugin directory."""
_FORMAT_VERSION = 1
_SAFE_GPU_UUID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}\Z")
_ENTRY = Shape(
    LedgerEntry,
    claim=needed(REF.kind),
    boot_id=needed(TEXT),
    step=needed(STEP.kind),
    ended=left_out(NUMBER),
    cause=left_out(TEXT),
)
_ENTRIES = list_of(_ENTRY.kind)


@dataclass(eq=False)
class Ledger:
    """The ledgers of all GPUs of a node in `directory`. For many threads.

    `without_record` returns the UIDs of claims that have a CDI spec and no readable record. A `reader` only looks, as
    in `RecordStore`; with `boot_id` None it takes each entry for one of this boot.
    """

    directory: Path
    records: RecordStore
    boot_id: str | None
    without_record: Callable[[], Collection[str]] = tuple
    reader: Callable[[UnreadableFile], None] | None = None

    def __post_init__(self) -> None:
        self._store: JsonStore[tuple[LedgerEntry, ...]] = JsonStore(
            self.directory,
            "ledger",
            lambda _name, content: _decode(content),
            self.reader or _tell,
            is_name=lambda name: _SAFE_GPU_UUID.fullmatch(name) is not None,
            only_reads=self.reader is not None,
        )
        self._gone: set[tuple[str, Step]] = set()
        """Keys of entries that are gone, and that a full disk may still have in their file."""
        self._seen: dict[tuple[str, Step], int] = {}
        """By the key of an entry, when this process first saw that its claim has ended."""
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory: on a full disk it could not be made. Raises: StateError."""
        open_directory(
            self.directory,
            self.boot_id or "",
            lambda gpu_uuid: _log.info("ledger_torn", gpu_uuid=gpu_uuid),
            durable=True,
        )

    # With `gpus` only what changes one of these GPUs.

    def entries(self, gpus: Collection[str] | None = None) -> list[LedgerEntry]:
        """What counts of all ledgers, first what is of this boot. Raises: StateError if the directory cannot be
        listed."""
        return self._counted(gpus)[0]

    def left(self) -> list[LedgerEntry]:
        """The entries of claims that have ended. Raises: StateError."""
        return self.look()[0]

    def look(
        self, gpus: Collection[str] | None = None
    ) -> tuple[list[LedgerEntry], list[LedgerEntry], list[LedgerEntry]]:
        """The entries of claims that have ended; all others that count; and those that count no more, because a reboot
        has undone them, or the disk was full when they went. Raises: StateError."""
        entries, stale = self._counted(gpus)
        records = self.records.all() if entries else {}
        is_lost = any(entry.claim.uid not in records for entry in entries)
        without_record = self.without_record() if is_lost else ()
        split: tuple[list[LedgerEntry], list[LedgerEntry]] = [], []
        for entry in entries:
            split[not has_ended(entry, records, without_record)].append(entry)
        return *split, stale

    def pending(self, gpus: Collection[str] | None = None) -> list[PendingCleanup]:
        """What is to be undone for claims that have ended, one for each claim. Raises: StateError."""
        ended, needed, _ = self.look(gpus)
        if not ended:
            return []
        return pending_cleanups(ended, [entry.step for entry in needed], self._since)

    def _counted(self, gpus: Collection[str] | None) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        """What is in the files and counts, as `entries`, and what does not. Raises: StateError."""
        with self._guard:
            gone = self._gone.copy()
        counted, stale = list[LedgerEntry](), list[LedgerEntry]()
        for entries in self._store.all().values():
            for entry in entries:
                if gpus is None or not gpus_of(entry.step).isdisjoint(gpus):
                    is_stale = entry.key in gone or not counts(entry, self.boot_id)
                    (stale if is_stale else counted).append(entry)
        return sorted(counted, key=lambda entry: entry.boot_id != self.boot_id), stale

    def missing(self, gpus: Collection[str] | None = None) -> list[LedgerEntry]:
        """The steps of prepared claims that are in no ledger: its file was damaged. Raises: StateError."""
        records = self.records.all().values()
        known = {entry.key for entry in self.entries(gpus)}
        return [
            LedgerEntry(record.ref, record.boot_id, step)
            for record in records
            if record.phase == "prepared"
            for step in record.steps
            if is_undone_in_lane(step)
            and (gpus is None or not gpus_of(step).isdisjoint(gpus))
            and (record.ref.uid, step) not in known
        ]

    def ended(self) -> list[ClaimRecord]:
        """The records of claims that have ended, as far as something of them is to be undone. Raises: StateError."""
        return [one.record for one in self.pending()]

    def _since(self, entry: LedgerEntry) -> int:
        """When its claim ended, in seconds since 1970; until the first try to undo it has ended, since when this
        process knows that."""
        return self._seen.setdefault(entry.key, int(time.time())) if entry.ended is None else entry.ended

    # --- in the lane of the GPU ----------------------------------------------------------------

    def add(self, entry: LedgerEntry) -> LedgerEntry | None:
        """Write an entry before its step is done; the one that it replaces, None if it is new. Raises: StateError."""
        return self._change(entry.home, [entry], ()).get(entry.key)

    def change(self, changed: Iterable[LedgerEntry], gone: Iterable[LedgerEntry]) -> None:
        """Write changed entries, and remove others. What a full disk does not let go is remembered as gone. Raises:
        StateError, after all."""
        problem: StateError | None = None
        by_home: dict[str, tuple[list[LedgerEntry], list[LedgerEntry]]] = {}
        for number, entries in enumerate((changed, gone)):
            for entry in entries:
                by_home.setdefault(entry.home, ([], []))[number].append(entry)
        for home, (here, away) in by_home.items():
            try:
                self._change(home, here, away)
            except StateError as error:
                problem = error
        if problem is not None:
            raise problem

    def _change(
        self, home: str, changed: Sequence[LedgerEntry], gone: Sequence[LedgerEntry]
    ) -> Mapping[tuple[str, Step], LedgerEntry]:
        """What counted before, by its key. Raises: StateError."""
        before = self._store.get(home) or ()
        away, news = {entry.key for entry in gone}, {entry.key: entry for entry in changed}
        with self._guard:
            for key in (*news, *away):
                self._seen.pop(key, None)
            self._gone -= news.keys()
            self._gone |= away
            left = [entry for entry in before if entry.key not in self._gone and counts(entry, self.boot_id)]
        # Undos run in the order of the file backwards. What an older boot did last may be done first in this boot.
        same = [entry for entry in left if news.get(entry.key, entry).boot_id == entry.boot_id]
        after = (*(news.pop(entry.key, entry) for entry in same), *news.values())
        if after != before:
            self._write(home, after)
        with self._guard:
            self._gone -= {entry.key for entry in before}
        return {entry.key: entry for entry in left}

    def _write(self, home: str, entries: Sequence[LedgerEntry]) -> None:
        if not entries:
            self._store.remove(home, durable=False)
            return
        content = encode_file({"entries": _ENTRIES.write(entries)}, _FORMAT_VERSION)
        # What a reboot undoes needs no sync.
        lasts = any(isinstance(entry.step, RunMps) for entry in entries)
        self._store.write(home, content, durable=lasts, whole=lasts)


def _decode(content: bytes) -> tuple[LedgerEntry, ...]:
    return parse_file(
        content,
        "ledger",
        lambda document: tuple(_ENTRIES.read("entries", document["entries"])),
        known=_FORMAT_VERSION,
    )


def _tell(found: UnreadableFile) -> None:
    remedy = "what prepared claims have set on the GPU is written again; what ended claims left on it may stay until "
    remedy += "the node reboots; look at the file, then remove it"
    if found.is_newer:
        remedy = (
            "claims that set something on the GPU are not prepared, and what ended claims left on it stays; "
        )
        remedy += "install that release again, or remove the file and reboot the node"
    _log.error(
        "ledger_unreadable",
        gpu_uuid=found.name,
        reason=found.reason,
        kept_as=str(found.kept_as),
        remedy=remedy,
    )
