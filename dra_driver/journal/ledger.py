"""The ledger of each GPU: what the plugin has set or made there. One JSON file a GPU, shared with a second instance of
the plugin during a rolling update.

    (nothing) ──written, then the step is done──▶ entry ──its claim ends──▶ pending cleanup ──undone──▶ (nothing)

An *entry* is a step whose undo needs a tool, a daemon or the silicon, with the claim that it was done for. It is
*pending cleanup* as long as no record names its step: so a claim ends by the removal of its record, which needs no
space on a full disk. A *detail* is what the step found or was given: a MIG device that we made, with its IDs; the MIG
mode that we switched on; what a card had before it went to vfio. The runner of the step writes and removes details.

| A crash … | leaves | and then |
|---|---|---|
| before the entry is written | the record | Prepare goes on, or Unprepare removes the record |
| between the entry and the end of the step | record, entry, some details | the same; an undo finds little to do |
| after the record is removed, or in an undo | the entry, some details | it is pending cleanup, which `cleaner` undoes |
| before the entry is removed | the entry | an undo runs again |

Only the lane of a GPU writes its file; a step that changes several GPUs is in the file of the first one. The records
are read after the ledgers: a claim whose record is written in between would else seem to have ended.

A reboot undoes everything but the directories of MPS daemons, so all else of an older boot is void. A claim that has an
unreadable record, or none, holds what its entries say until its CDI spec is removed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from dra_driver.base.fields import (
    Codec,
    Tagged,
    encode_file,
    list_of,
    parse_file,
    required,
)
from dra_driver.base.json_store import JsonStore, UnreadableFile, log_unreadable, open_directory
from dra_driver.errors import StateError
from dra_driver.journal.records import STEP, RecordStore
from dra_driver.journal.rules.cleanups import (
    LedgerEntry,
    PendingCleanup,
    counts,
    gpus_of,
    has_ended,
    is_undone_in_lane,
    pending_cleanups,
)
from dra_driver.model.gpu import OwnedCard
from dra_driver.model.mig import OwnedInstance, OwnedMode
from dra_driver.model.record import ClaimRecord, RunMps, SetTimeSlice, Step

_log = structlog.get_logger(__name__)

DIRECTORY = "ledger"
"""Below the plugin directory."""
_FORMAT_VERSION = 1
_SAFE_GPU_UUID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}\Z")
_REMEMBERED_S = 30.0
"""How long a detail that is gone is remembered: a look at the hardware may have begun before."""

Detail = OwnedInstance | OwnedMode | OwnedCard
Item = LedgerEntry | Detail
D = TypeVar("D", OwnedInstance, OwnedMode, OwnedCard)
_ITEM: Tagged[Item] = Tagged(
    "ledger entry",
    step=Codec(LedgerEntry, step=required(STEP.kind)),
    mig_device=Codec(OwnedInstance),
    mig_mode=Codec(OwnedMode),
    card=Codec(OwnedCard),
)
_ITEMS = list_of(_ITEM.kind)


@dataclass(eq=False)
class Ledger:
    """The ledgers of all GPUs of a node in `directory`. For many threads.

    `without_record` returns the UIDs of claims that have a CDI spec and no readable record. A `reader` only looks, as
    in `RecordStore`; with `boot_id` None it takes each entry for one of this boot. `clock` counts in seconds.
    """

    directory: Path
    records: RecordStore
    boot_id: str | None
    without_record: Callable[[], Collection[str]] = tuple
    reader: Callable[[UnreadableFile], None] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._store: JsonStore[tuple[Item, ...]] = JsonStore(
            self.directory,
            "ledger",
            lambda _name, content: _decode(content),
            self.reader
            or log_unreadable(
                unreadable_event="ledger_unreadable",
                name="gpu_uuid",
                remedy="what prepared claims have set on the GPU is written again; what ended claims left on it may "
                "stay until the node reboots; look at the file, then remove it",
                newer="claims that set something on the GPU are not prepared, and what ended claims left on it stays; "
                "install that release again, or remove the file and reboot the node",
            ),
            is_name=lambda name: _SAFE_GPU_UUID.fullmatch(name) is not None,
            only_reads=self.reader is not None,
        )
        self._gone: set[Hashable] = set()
        """What is gone, and what a full disk may still have in its file: keys of entries, and whole details."""
        self._details: frozenset[Detail] = frozenset()
        """As of the last look."""
        self._lately: dict[Detail, float] = {}
        """Details that are gone, with when that was seen."""
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

    # With `gpus` only what is of one of these GPUs.

    def entries(self, gpus: Collection[str] | None = None) -> list[LedgerEntry]:
        """What counts of all ledgers, first what is of this boot. Raises: StateError if the directory cannot be
        listed."""
        entries = [item for item in self._counted(gpus)[0] if isinstance(item, LedgerEntry)]
        return sorted(entries, key=lambda entry: entry.boot_id != self.boot_id)

    def left(self) -> list[LedgerEntry]:
        """The entries of claims that have ended. Raises: StateError."""
        return self.look()[0]

    def look(self, gpus: Collection[str] | None = None) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        """The entries of claims that have ended, and all others that count. Raises: StateError."""
        entries = self.entries(gpus)
        records = self.records.all() if entries else {}
        is_lost = any(entry.claim.uid not in records for entry in entries)
        without_record = self.without_record() if is_lost else ()
        split: tuple[list[LedgerEntry], list[LedgerEntry]] = [], []
        for entry in entries:
            split[not has_ended(entry, records, without_record)].append(entry)
        return split

    def void(self) -> set[str]:
        """The GPUs whose file has what counts no more, because a reboot has undone it, or the disk was full when it
        went. Raises: StateError."""
        return self._counted(None)[1]

    def pending(self, gpus: Collection[str] | None = None) -> list[PendingCleanup]:
        """What is to be undone for claims that have ended, one for each claim. Raises: StateError."""
        ended, needed = self.look(gpus)
        if not ended:
            return []
        return pending_cleanups(ended, [entry.step for entry in needed], self._since)

    def pending_before(
        self, gpu_uuids: Collection[str], besides: Collection[str] = ()
    ) -> list[PendingCleanup]:
        """What is to be undone on these GPUs before a claim gets a device there: all but time slices, for which no
        claim waits, and the cleanups named `besides`. Raises: StateError."""
        found = [
            replace(
                one,
                steps=tuple(
                    step
                    for step in one.steps
                    if not isinstance(step, SetTimeSlice) and not gpus_of(step).isdisjoint(gpu_uuids)
                ),
            )
            for one in self.pending(gpu_uuids)
            if one.name not in besides
        ]
        return [one for one in found if one.steps]

    def _counted(self, gpus: Collection[str] | None) -> tuple[list[Item], set[str]]:
        """What is in the files and counts, and the GPUs in whose files there is more. Raises: StateError."""
        with self._guard:
            gone = self._gone.copy()
        counted, void, details = list[Item](), set[str](), set[Detail]()
        if self.reader is not None and not self._is_there():
            return counted, void
        for home, items in self._store.all().items():
            for item in items:
                if _mark(item) in gone or not counts(item, self.boot_id):
                    void.add(home)
                    continue
                if not isinstance(item, LedgerEntry):
                    details.add(item)
                if gpus is None or not _gpus(item).isdisjoint(gpus):
                    counted.append(item)
        with self._guard:
            self._lately |= dict.fromkeys(self._details - details, self.clock())
            self._details = frozenset(details)
        return counted, void

    def _is_there(self) -> bool:
        """Whether there is a directory, or something else that is no evidence that no plugin has run here yet."""
        try:
            self.directory.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def details(self, kind: type[D], gpu_uuid: str | None = None) -> list[D]:
        """The details of this boot of one type, of all GPUs or of one. Raises: StateError."""
        items, _ = self._counted(None if gpu_uuid is None else {gpu_uuid})
        return [item for item in items if isinstance(item, kind)]

    def lately(self, kind: type[D], gpu_uuid: str) -> list[D]:
        """The details of a GPU that this or the other instance has removed in the last 30 s."""
        limit = self.clock() - _REMEMBERED_S
        with self._guard:
            self._lately = {item: moment for item, moment in self._lately.items() if moment >= limit}
            return [item for item in self._lately if isinstance(item, kind) and item.gpu_uuid == gpu_uuid]

    def created_instance(self, device: str) -> OwnedInstance | None:
        """The MIG device as it was made in this boot, with IDs and UUID; None if it was not. Raises: StateError."""
        made = (item for item in self.details(OwnedInstance) if item.device == device)
        return next((item for item in made if item.phase == "created"), None)

    def created_uuid(self, device: str) -> str | None:
        """The UUID that a MIG device made on demand has now. Raises: StateError."""
        made = self.created_instance(device)
        return None if made is None else made.uuid

    def unreadable(self) -> Collection[str]:
        """The GPUs whose ledger, or an earlier one that was set aside, could not be read when it was read last."""
        return {path.name.partition(".json")[0] for path in self._store.quarantined()}

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

    def known_records(self) -> list[ClaimRecord]:
        """Of claims, and of ended claims whose cleanup is pending. Raises: StateError."""
        return [*self.records.all().values(), *self.ended()]

    def _since(self, entry: LedgerEntry) -> int:
        """When its claim ended, in seconds since 1970; until the first try to undo it has ended, since when this
        process knows that."""
        return self._seen.setdefault(entry.key, int(time.time())) if entry.ended is None else entry.ended

    # --- in the lane of the GPU ----------------------------------------------------------------

    def add(self, entry: LedgerEntry) -> LedgerEntry | None:
        """Write an entry before its step is done; the one that it replaces, None if it is new. Raises: StateError."""
        before = self._change(entry.home, [entry], ()).get(entry.key)
        return before if isinstance(before, LedgerEntry) else None

    def save(self, detail: Detail) -> None:
        """Write a detail. It is not synced, so an error with which the disk takes it only later is not seen. Raises:
        StateError."""
        self._change(detail.gpu_uuid, [detail], ())

    def remove(self, detail: Detail) -> None:
        """Remove a detail; nothing happens if it is gone. What a full disk keeps is remembered as gone."""
        with suppress(StateError):
            self.change((), [detail])

    def change(self, changed: Iterable[Item], gone: Iterable[Item], void: Iterable[str] = ()) -> None:
        """Write changed items, and remove others, and in the files of the GPUs `void` what counts no more. What a full
        disk does not let go is remembered as gone. Raises: StateError, after all."""
        problem: StateError | None = None
        by_home: dict[str, tuple[list[Item], list[Item]]] = {gpu: ([], []) for gpu in void}
        for number, items in enumerate((changed, gone)):
            for item in items:
                by_home.setdefault(_home(item), ([], []))[number].append(item)
        for home, (here, away) in by_home.items():
            try:
                self._change(home, here, away)
            except StateError as error:
                problem = error
        if problem is not None:
            raise problem

    def _change(self, home: str, changed: Sequence[Item], gone: Sequence[Item]) -> Mapping[Hashable, Item]:
        """What counted before, by its key. Raises: StateError."""
        before = self._store.get(home) or ()
        away, news = set(map(_key, gone)), {_key(item): item for item in changed}
        with self._guard:
            for item in (*changed, *gone):
                if isinstance(item, LedgerEntry):
                    self._seen.pop(item.key, None)
            self._gone -= set(map(_mark, changed))
            self._gone |= {_mark(item) for item in before if _key(item) in away}
            left = [item for item in before if _mark(item) not in self._gone and counts(item, self.boot_id)]
            lost = [item for item in before if _key(item) in away and not isinstance(item, LedgerEntry)]
            self._lately |= dict.fromkeys(lost, self.clock())
            self._details -= set(lost)
        # Undos run in the order of the file backwards. What an older boot did last may be done first in this boot.
        same = [item for item in left if news.get(_key(item), item).boot_id == item.boot_id]
        after = (*(news.pop(_key(item), item) for item in same), *news.values())
        if after != before:
            self._write(home, after)
        with self._guard:
            self._gone -= set(map(_mark, before))
        return {_key(item): item for item in left}

    def _write(self, home: str, items: Sequence[Item]) -> None:
        if not items:
            self._store.remove(home, durable=False)
            return
        content = encode_file({"entries": _ITEMS.write(items)}, _FORMAT_VERSION)
        # What a reboot undoes needs no sync.
        lasts = any(isinstance(item, LedgerEntry) and isinstance(item.step, RunMps) for item in items)
        self._store.write(home, content, durable=lasts, whole=lasts)


def _key(item: Item) -> Hashable:
    """A ledger has one item of a key."""
    match item:
        case LedgerEntry():
            return item.key
        case OwnedInstance():
            return item.device
        case _:
            return type(item).__name__


def _mark(item: Item) -> Hashable:
    """How an item that is gone is known again: an entry whatever became of it, a detail as it was."""
    return item.key if isinstance(item, LedgerEntry) else item


def _home(item: Item) -> str:
    return item.home if isinstance(item, LedgerEntry) else item.gpu_uuid


def _gpus(item: Item) -> frozenset[str]:
    return gpus_of(item.step) if isinstance(item, LedgerEntry) else frozenset({item.gpu_uuid})


def _decode(content: bytes) -> tuple[Item, ...]:
    return parse_file(
        content,
        "ledger",
        lambda document: tuple(_ITEMS.read("entries", document["entries"])),
        known=_FORMAT_VERSION,
    )
