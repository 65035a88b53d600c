"""Decides which cleanups are pending: ledger entries whose claims no longer need them. What an active claim
also needs is not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import OwnedCard, SettingBefore
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.mig import OwnedInstance, OwnedMode
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import LEDGER_STEPS, AnyStep, FileStep, LedgerStep

S = TypeVar("S", bound=AnyStep)
Detail = OwnedInstance | OwnedMode | OwnedCard | SettingBefore
Thing = tuple[str, str]
"""The kind of a step's cleanup, and a GPU or device."""
CLEANUP_KINDS: tuple[str, ...] = tuple(step.cleanup for step in LEDGER_STEPS)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A step that was done, or is about to be done, for a claim in boot `boot_id`.

    `ended` is when the claim ended (seconds since 1970), `cause` why the last undo failed; both are None
    before the first try.
    """

    claim: ClaimRef
    boot_id: str
    step: LedgerStep
    ended: int | None = None
    cause: str | None = None

    @property
    def key(self) -> tuple[str, LedgerStep]:
        return self.claim.uid, self.step

    @property
    def home(self) -> str:
        """The GPU whose ledger has the entry."""
        return min(self.step.gpus)


@dataclass(frozen=True, slots=True)
class PendingCleanup:
    """What must still be undone for one ended claim. `name` is the claim's UID, `since` is as `ended` in its
    entries.
    """

    name: str
    record: ClaimRecord
    steps: tuple[LedgerStep, ...]
    since: int
    cause: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.cleanup for step in self.steps))

    def withholds(self, boot_id: str | None) -> bool:
        return boot_id in (None, self.record.boot_id) and any(step.withholds for step in self.steps)

    @property
    def text(self) -> str:
        pending = ", ".join(step.undoing for step in self.steps)
        worst = max(self.steps, key=lambda step: LEDGER_STEPS.index(type(step)))  # it is undone first
        cause = f": {self.cause}" if self.cause else ""
        return f"Cleanup pending for claim {self.record.ref}: {pending}{cause}; {worst.remedy}"


@dataclass(frozen=True, slots=True)
class UnreadLedger:
    """A newer release's ledger, written at `since` (seconds since 1970). It withholds every device of the
    GPU, because its cleanups are unknown.
    """

    gpu_uuid: str
    since: int
    why: str

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("unknown",)

    @property
    def text(self) -> str:
        return f"GPU {self.gpu_uuid} gets no new claims: {self.why}"


Withholding = PendingCleanup | UnreadLedger


def counts(item: LedgerEntry | Detail, boot_id: str | None) -> bool:
    """Whether no reboot has undone the item. Without a `boot_id`, every item is valid."""
    return boot_id in (None, item.boot_id) or (isinstance(item, LedgerEntry) and item.step.outlives_reboot)


def has_ended(
    entry: LedgerEntry, records: Mapping[str, ClaimRecord], without_record: Collection[str]
) -> bool:
    record = records.get(entry.claim.uid)
    return entry.claim.uid not in without_record if record is None else entry.step not in record.steps


def pending_cleanups(
    entries: Iterable[LedgerEntry], needed: Sequence[LedgerStep], since: Callable[[LedgerEntry], int]
) -> list[PendingCleanup]:
    """Return one for each ended claim, ordered by UID, without steps that set the same as a `needed` one."""
    ended: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        ended.setdefault(entry.claim.uid, []).append(entry)
    kept = things(needed)
    found = (_pending(ended[uid], kept, since) for uid in sorted(ended))
    return [one for one in found if one.steps]


def _pending(
    entries: Sequence[LedgerEntry], kept: Collection[Thing], since: Callable[[LedgerEntry], int]
) -> PendingCleanup:
    causes = dict.fromkeys(entry.cause for entry in entries if entry.cause)
    steps = tuple(entry.step for entry in entries)
    devices = tuple(held for step in steps for held in step.devices)
    claim = AllocatedClaim(entries[0].claim, (), ())
    record = ClaimRecord(claim, "preparing", entries[0].boot_id, devices, steps)
    return PendingCleanup(
        record.ref.uid,
        record,
        without(steps, kept),
        min(map(since, entries)),
        "; ".join(causes) or None,
    )


def without(steps: Iterable[LedgerStep], kept: Collection[Thing]) -> tuple[LedgerStep, ...]:
    return tuple(step for step in steps if things([step]).isdisjoint(kept))


def things(steps: Iterable[LedgerStep]) -> frozenset[Thing]:
    return frozenset((step.cleanup, name) for step in steps for name in step.sets)


def by_gpus(steps: Iterable[S]) -> list[tuple[frozenset[str], list[S]]]:
    """Group the steps by the GPUs that they change, without steps that only write files.

    No GPU is in two groups, so groups can run in parallel. An MPS daemon of several GPUs merges their groups.
    """
    changing = [(step.gpus, step) for step in steps if not isinstance(step, FileStep)]
    groups: list[frozenset[str]] = []
    for gpus, _ in changing:
        joined = [group for group in groups if group & gpus or group == gpus]
        groups = [group for group in groups if group not in joined] + [gpus.union(*joined)]
    return [(group, [step for gpus, step in changing if gpus & group or gpus == group]) for group in groups]


def withholding(
    cleanups: Iterable[PendingCleanup], device: OfferedDevice, boot_id: str
) -> PendingCleanup | None:
    names = (device.name, device.gpu.uuid)
    return next(
        (
            cleanup
            for cleanup in cleanups
            if cleanup.withholds(boot_id)
            and any(not step.withholds.isdisjoint(names) for step in cleanup.steps)
        ),
        None,
    )
