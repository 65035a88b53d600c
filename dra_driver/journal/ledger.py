"""A ledger for each GPU, one JSON file: what the plugin has set or created on it.

An *entry* names a claim and one of its steps. It is written before the step is done, and becomes *pending
cleanup* once no record names the step. So removing a claim's record ends the claim, which also works on a
full disk. A *detail* is what a step found or created, such as a MIG device with its IDs. The runner of the
step writes and removes details.

After a crash during a step, the entry may lack details, and the undo may find nothing to do. After a crash
during an undo, the undo runs again.

Only the lane of a GPU writes its file; a step that changes several GPUs is in the file of the first one.
Ledgers are read before records; otherwise a claim whose record is written in between would seem to have
ended.

A reboot undoes everything except the directories of MPS daemons, so other items of an older boot are void. A
GPU with a newer release's ledger gets no new claims; only the details that this release understands are read.
A claim without a readable record holds the devices of its entries until its CDI spec is removed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, assert_never

import structlog

from dra_driver.base.fields import (
    Codec,
    FileFormat,
    NewerFormatError,
    Tagged,
    list_of,
    required,
)
from dra_driver.base.json_store import JsonStore, UnreadableFile, log_unreadable, open_directory
from dra_driver.errors import StateError
from dra_driver.journal.records import STEP, RecordStore
from dra_driver.journal.rules.cleanups import (
    Detail,
    LedgerEntry,
    PendingCleanup,
    UnreadLedger,
    counts,
    has_ended,
    pending_cleanups,
)
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import OwnedCard, SettingBefore
from dra_driver.model.mig import OwnedInstance, OwnedMode
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import KeptStep, LedgerStep

_log = structlog.get_logger(__name__)

DIRECTORY = "ledger"
"""Below the plugin directory."""
_SAFE_GPU_UUID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}\Z")
_REMEMBERED_S = 30.0
"""For removed details: a hardware scan may have begun earlier."""

Item = LedgerEntry | Detail
D = TypeVar("D", OwnedInstance, OwnedMode, OwnedCard, SettingBefore)
_ITEM: Tagged[Item] = Tagged(
    "ledger entry",
    step=Codec(LedgerEntry, step=required(STEP.kind)),
    mig_device=Codec(OwnedInstance),
    mig_mode=Codec(OwnedMode),
    card=Codec(OwnedCard),
    setting=Codec(SettingBefore),
)
_ITEMS = list_of(_ITEM.kind)
_FILE: FileFormat[Sequence[Item]] = FileFormat(
    "ledger",
    lambda document: tuple(_ITEMS.read("entries", document["entries"])),
    lambda items: {"entries": _ITEMS.write(items)},
)


@dataclass(eq=False)
class Ledger:
    """Thread-safe. Methods that read the directory or write raise StateError.

    `without_record` returns the claims that have a CDI spec and no readable record. With a `reader` (as in
    `RecordStore`), a missing directory has no ledgers. Without `boot_id`, every entry counts as one of this
    boot. `gpus` restricts a result to items of these GPUs.
    """

    directory: Path
    records: RecordStore
    boot_id: str | None
    without_record: Callable[[], Collection[str]] = tuple
    reader: Callable[[UnreadableFile], None] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._store: JsonStore[Sequence[Item]] = JsonStore(
            self.directory,
            _FILE.what,
            lambda _name, content: _FILE.read(content),
            _FILE.write,
            self.reader
            or log_unreadable(
                unreadable_event="ledger_unreadable",
                name="gpu_uuid",
                remedy="the plugin adds the settings of prepared claims to a new ledger; settings of deleted claims "
                "may remain on the GPU until the node reboots; inspect the file, then remove it",
                newer="the plugin cannot prepare claims that change settings of the GPU, and settings of deleted "
                "claims remain on the GPU; install the newer release again, or remove the file and reboot the node",
            ),
            is_name=lambda name: _SAFE_GPU_UUID.fullmatch(name) is not None,
            keys=lambda items: frozenset().union(*map(_gpus, items)),
        )
        self._gone: set[Hashable] = set()
        """Removed items that a full disk may have kept in the file: keys of entries, and whole details."""
        self._removed: dict[Detail, float] = {}
        """With the time of the removal."""
        self._seen: dict[tuple[str, LedgerStep], int] = {}
        """By entry key: when this process first saw that the claim had ended."""
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory now, because a full disk would prevent it later; remove unsynced ledgers that
        a power cut damaged, and load the others.
        """
        open_directory(
            self.directory,
            self.boot_id or "",
            lambda gpu_uuid: _log.info("ledger_torn", gpu_uuid=gpu_uuid),
        )
        self._store.load()

    def close(self) -> None:
        self._store.close()

    # In the methods below, `gpus` restricts the result to items of these GPUs.

    def entries(self, gpus: Collection[str] | None = None) -> list[LedgerEntry]:
        """Return the valid entries, those of this boot first."""
        entries = [item for item in self._counted(gpus)[0] if isinstance(item, LedgerEntry)]
        return sorted(entries, key=lambda entry: entry.boot_id != self.boot_id)

    def left(self) -> list[LedgerEntry]:
        return self.split()[0]

    def split(self, gpus: Collection[str] | None = None) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        """Return the entries of ended claims, and the other valid entries."""
        entries = self.entries(gpus)
        records = self.records.all() if entries else {}
        is_lost = any(entry.claim.uid not in records for entry in entries)
        without_record = self.without_record() if is_lost else ()
        parts: tuple[list[LedgerEntry], list[LedgerEntry]] = [], []
        for entry in entries:
            parts[not has_ended(entry, records, without_record)].append(entry)
        return parts

    def void(self) -> set[str]:
        """Return the GPUs whose files contain void items: a reboot undid them, or the disk was full at their
        removal.
        """
        return self._counted(None)[1]

    def pending(self, gpus: Collection[str] | None = None) -> list[PendingCleanup]:
        ended, needed = self.split(gpus)
        if not ended:
            return []
        return pending_cleanups(ended, [entry.step for entry in needed], self._since)

    def pending_before(
        self, gpu_uuids: Collection[str], excluded: Collection[str] = ()
    ) -> list[PendingCleanup]:
        """Return the cleanups that must run before a claim gets a device of these GPUs, without steps that
        withhold nothing.
        """
        found = [
            replace(
                one,
                steps=tuple(
                    step for step in one.steps if step.withholds and not step.gpus.isdisjoint(gpu_uuids)
                ),
            )
            for one in self.pending(gpu_uuids)
            if one.name not in excluded
        ]
        return [one for one in found if one.steps]

    def _counted(
        self, gpus: Collection[str] | None, is_wanted: Callable[[Item], bool] = lambda _: True
    ) -> tuple[list[Item], set[str]]:
        """Return the valid ones of the wanted items, and the GPUs whose files also have void ones."""
        with self._guard:
            gone = self._gone.copy()
        counted, void = list[Item](), set[str]()
        if self.reader is not None and not self._is_there():
            return counted, void
        ledgers = self._store.all() if gpus is None else self._store.having(gpus)
        unread = {uuid: _known_details(found.newer) for uuid, found in self._store.newer().items()}
        for home, items in (ledgers | unread).items():
            for item in items:
                if not is_wanted(item):
                    continue
                if _mark(item) in gone or not counts(item, self.boot_id):
                    void |= {home} & ledgers.keys()
                elif gpus is None or not _gpus(item).isdisjoint(gpus):
                    counted.append(item)
        return counted, void

    def _is_there(self) -> bool:
        """Whether the directory may exist. Only a missing one proves that no plugin has run here."""
        try:
            self.directory.stat()
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        return True

    def details(
        self, kind: type[D], gpu_uuid: str | None = None, is_wanted: Callable[[D], bool] = lambda _: True
    ) -> list[D]:
        items, _ = self._counted(
            None if gpu_uuid is None else {gpu_uuid},
            lambda item: isinstance(item, kind) and is_wanted(item),
        )
        return [item for item in items if isinstance(item, kind)]

    def recently_removed(self, kind: type[D], gpu_uuid: str) -> list[D]:
        """Return what was removed in the last 30 s."""
        limit = self.clock() - _REMEMBERED_S
        with self._guard:
            self._removed = {item: moment for item, moment in self._removed.items() if moment >= limit}
            return [item for item in self._removed if isinstance(item, kind) and item.gpu_uuid == gpu_uuid]

    def created_instance(self, device: str) -> OwnedInstance | None:
        """Return the MIG device that was created under this name in this boot."""
        # Scrapes call this for each device, so other items are skipped first.
        made = self.details(
            OwnedInstance, is_wanted=lambda item: item.device == device and item.phase == "created"
        )
        return next(iter(made), None)

    def created_uuid(self, device: str) -> str | None:
        made = self.created_instance(device)
        return None if made is None else made.uuid

    def unreadable(self) -> Collection[str]:
        """Return the GPUs whose ledger cannot be read, or has been set aside."""
        return {path.name.partition(".json")[0] for path in self._store.quarantined()}

    def newer(self) -> Mapping[str, UnreadLedger]:
        """As of the last read, by GPU UUID."""
        return {
            uuid: UnreadLedger(uuid, found.since, str(found.newer))
            for uuid, found in self._store.newer().items()
        }

    def refuse_newer(self, gpu_uuids: Collection[str]) -> None:
        """Raise StateError if a newer release wrote the ledger of a GPU: what is set there is unknown."""
        for uuid, unread in sorted(self.newer().items()):
            if uuid in gpu_uuids:
                raise StateError(unread.text)

    def problems(self) -> Sequence[NodeProblem]:
        return self._store.problems()

    def missing(self, gpus: Collection[str] | None = None) -> list[LedgerEntry]:
        """Return the steps of prepared claims that no ledger lists, because a file was damaged. Leave out
        GPUs with a newer release's ledger, which may list them.
        """
        records = (self.records.all() if gpus is None else self.records.having(gpus)).values()
        known = {entry.key for entry in self.entries(gpus)}
        newer = self.newer()
        return [
            entry
            for record in records
            if record.phase == "prepared"
            for step in record.steps
            if isinstance(step, KeptStep)
            and (gpus is None or not step.gpus.isdisjoint(gpus))
            and (entry := LedgerEntry(record.ref, record.boot_id, step)).key not in known
            and entry.home not in newer
        ]

    def ended(self) -> list[ClaimRecord]:
        return [one.record for one in self.pending()]

    def known_records(self) -> list[ClaimRecord]:
        return [*self.records.all().values(), *self.ended()]

    def _since(self, entry: LedgerEntry) -> int:
        """Return when the claim ended (seconds since 1970); before the first undo, when this process first
        saw that.
        """
        return self._seen.setdefault(entry.key, int(time.time())) if entry.ended is None else entry.ended

    # --- in the lane of the GPU ----------------------------------------------------------------

    def add(self, entry: LedgerEntry) -> LedgerEntry | None:
        """Write an entry before its step is done; return the one that it replaces."""
        before = self._change(entry.home, [entry], ()).get(entry.key)
        return before if isinstance(before, LedgerEntry) else None

    def save(self, detail: Detail) -> None:
        """Write a detail. The file may not be synced."""
        self._change(detail.gpu_uuid, [detail], ())

    def remove(self, detail: Detail) -> None:
        """Remove a detail. If the disk is full, the ledger only remembers the removal."""
        with suppress(StateError):
            self.change((), [detail])

    def change(self, changed: Iterable[Item], gone: Iterable[Item], void: Iterable[str] = ()) -> None:
        """Write `changed` items, remove `gone` ones, and drop void items of the GPUs in `void`.

        If the disk is full, the ledger remembers what was removed. It tries every file before it raises
        StateError.
        """
        problem: StateError | None = None
        by_home: dict[str, tuple[list[Item], list[Item]]] = {gpu: ([], []) for gpu in void}
        for number, items in enumerate((changed, gone)):
            for item in items:
                by_home.setdefault(_home(item), ([], []))[number].append(item)
        for home, (now_valid, now_gone) in by_home.items():
            try:
                self._change(home, now_valid, now_gone)
            except StateError as error:
                problem = error
        if problem is not None:
            raise problem

    def _change(self, home: str, changed: Sequence[Item], gone: Sequence[Item]) -> Mapping[Hashable, Item]:
        """Return the previously valid items by key."""
        before = self._store.get(home) or ()
        gone_keys, news = set(map(_key, gone)), {_key(item): item for item in changed}
        with self._guard:
            for item in (*changed, *gone):
                if isinstance(item, LedgerEntry):
                    self._seen.pop(item.key, None)
            self._gone -= set(map(_mark, changed))
            self._gone |= {_mark(item) for item in before if _key(item) in gone_keys}
            left = [item for item in before if _mark(item) not in self._gone and counts(item, self.boot_id)]
            lost = [item for item in before if _key(item) in gone_keys and not isinstance(item, LedgerEntry)]
            self._removed |= dict.fromkeys(lost, self.clock())
        # Undos run in the reverse order of the file, so an entry of an older boot moves to the end when its step runs
        # again.
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
        # Items that a reboot undoes need not be synced.
        lasts = any(isinstance(item, LedgerEntry) and item.step.outlives_reboot for item in items)
        self._store.write(home, items, durable=lasts, whole=lasts)


def _key(item: Item) -> Hashable:
    match item:
        case LedgerEntry():
            return item.key
        case OwnedInstance():
            return item.device
        case SettingBefore():
            return item.setting
        case OwnedMode() | OwnedCard():
            return type(item).__name__
        case _:
            assert_never(item)


def _mark(item: Item) -> Hashable:
    return item.key if isinstance(item, LedgerEntry) else item


def _home(item: Item) -> str:
    return item.home if isinstance(item, LedgerEntry) else item.gpu_uuid


def _gpus(item: Item) -> frozenset[str]:
    return item.step.gpus if isinstance(item, LedgerEntry) else frozenset({item.gpu_uuid})


def _known_details(newer: NewerFormatError | None) -> Sequence[Item]:
    """Return the details that this release understands, so that MIG devices and cards of claims do not seem
    foreign. No one undoes them.
    """
    return [item for item in _ITEM.readable(newer, "entries") if not isinstance(item, LedgerEntry)]
