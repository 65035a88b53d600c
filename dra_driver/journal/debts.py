"""Debts on disk, and the keeper that pays them.

Unprepare needs only files. A step whose undo needs a tool, a daemon or the silicon keeps no claim from ending:

    record ──files removed, moved───▶ debt ──every other step undone──▶ (nothing)
                                        │ ▲
              an undo failed: it stays ─┘ └─ the keeper tries again, until it is paid, or a newer claim or a reboot
                                             made it void

The claim's record becomes the debt by a move, from `claims/<uid>.json` to `debts/<uid>.json`. So a full disk is no
obstacle. The move comes before the undos: of two claims that share a device and end at the same time, each would else
take the other one for a user of the device. The move needs no lock on a GPU: a hung step of another claim cannot hold
the Unprepare up.

| A crash … | leaves | and then |
|---|---|---|
| before the move | the record | the kubelet calls Unprepare again |
| within the move | record and debt | the same; the claim then owes twice, and both are paid |
| after the move, or in an undo | the debt | the next Unprepare finds no record and succeeds; the keeper pays |
| before a paid debt is removed | the debt | the keeper pays again; an undo may run again |

A payment holds the lock of the GPU and reads the records anew, so it never takes back what a newer claim has set. A
claim that is prepared and unprepared again may owe twice: the second debt gets a number in its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from dra_driver.concurrency.backoff import Backoff
from dra_driver.concurrency.deadline import at_most, time_left
from dra_driver.concurrency.side_by_side import side_by_side
from dra_driver.concurrency.worker import BackgroundWorker
from dra_driver.errors import DraDriverError, RetryableError, StateError
from dra_driver.files.atomic import make_directory
from dra_driver.files.json_store import JsonStore, UnreadableFile, open_directory
from dra_driver.journal.gpu_locks import GpuLocks, HeldGpus
from dra_driver.journal.record_codec import decode
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.debts import Debt, gpus_of, still_owed, withholding, without
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, RunMps, Step

_log = structlog.get_logger(__name__)

UNDO_S = 5.0
"""How long one undo may take whose failure does not keep the claim from ending."""
_SETTLE_S = 8.0
"""How long a Prepare waits until what is owed on its GPUs is paid."""
_HANGS_S = 30.0
"""How long the keeper waits for one payment."""
_LOCK_S = 1.0
_LOOK_EVERY_S = 5.0
"""How often the keeper looks for debts that the other instance of a rolling update left."""
_TOOLS_EVERY_S = 1.0
_RETRY_FIRST_S = 1.0
_RETRY_MOST_S = 60.0
_STOP_S = 5.0


class Undo(Protocol):
    """Takes a step back; see `executor.StepRunner`."""

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Take back what the step may have done; the record must be enough for that."""


class DebtObserver(Protocol):
    """Hears of debts; reporting does. Must not block or raise."""

    def owed(self, debt: Debt) -> None:
        """A claim has ended and owes something."""

    def paid(self, debt: Debt) -> None:
        """A debt is paid, or void."""


class Debts:
    """The debts of a node: one file for each, shared by both instances of a rolling update. For many threads."""

    def __init__(
        self,
        directory: Path,
        records: RecordStore,
        boot_id: str | None,
        observer: DebtObserver | None = None,
        changed: Callable[[], None] = lambda: None,
        reader: Callable[[UnreadableFile], None] | None = None,
    ) -> None:
        """`changed` is called after debts were made, paid or lessened. A `reader` only looks, as in `RecordStore`; with
        `boot_id` None it takes every debt for one of this boot."""
        self._directory = directory
        self._records = records
        self._boot_id = boot_id
        self._observer = observer
        self._changed = changed
        self._store = JsonStore(
            directory,
            "debt",
            lambda _name, content: decode(content),
            reader or _tell,
            is_name=lambda name: not name.startswith("."),
            only_reads=reader is not None,
        )
        self._left: dict[
            str, tuple[tuple[Step, ...], str]
        ] = {}  # by name: what this process knows to be owed, and why
        self._under_way: set[str] = set()
        self.shown: set[str] = set()
        """Names of the debts that counted when `owing` was asked last, for what is published."""
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory: on a full disk it could not be made. Raises: StateError."""
        open_directory(
            self._directory, self._boot_id or "", lambda name: _log.info("debt_torn", debt=name), durable=True
        )

    def begin(self, record: ClaimRecord) -> Debt:
        """Make a record on disk the debt of all its steps; its claim has ended then. Raises: StateError; then the
        record stays."""
        make_directory(self._directory, 0o700)
        name = next(name for name in _names(record.ref.uid) if not self._store.path(name).exists())
        with self._guard:
            self._under_way.add(name)
        try:
            self._records.move(record.ref.uid, self._store.path(name))
        except BaseException:
            self.let_go(name)
            raise
        return Debt(name, record, record.steps, int(time.time()))

    def let_go(self, name: str) -> None:
        """The undos of a debt that has begun are not under way any more."""
        with self._guard:
            self._under_way.discard(name)

    def end(self, debt: Debt) -> None:
        """Nothing of it is owed any more. Raises: StateError."""
        # Not synced: a debt that came back after a power cut is void, since the boot has ended.
        self._store.delete(debt.name, durable=False)
        with self._guard:
            self._left.pop(debt.name, None)

    def keep(self, debt: Debt, steps: Sequence[Step], cause: str) -> None:
        """These steps of a debt that has just begun are still owed, for this cause. Raises: StateError."""
        steps = still_owed(steps, debt.record, self._boot_id or "")
        if not steps:
            self.end(debt)
        elif self._store.path(debt.name).exists():  # the keeper may have been quicker
            debt = replace(debt, steps=steps, cause=cause)
            with self._guard:
                known = [step for left, _ in self._left.values() for step in left]
                self._left[debt.name] = (steps, cause)
            ref = debt.record.ref
            _log.warning("claim_owes", claim=str(ref), claim_uid=ref.uid, debt=debt.name, reason=debt.text)
            if self._observer is not None and without(steps, known):
                self._observer.owed(debt)
        self._changed()

    def all(self) -> list[Debt]:
        """Every debt that can be read, by name; those with no steps are void. Raises: StateError."""
        found = self._store.all()
        with self._guard:
            self._left = {name: known for name, known in self._left.items() if name in found}
        return [debt for name, record in found.items() if (debt := self._debt(name, record)) is not None]

    def ended(self) -> list[ClaimRecord]:
        """The records of claims that have ended and of which something is still being undone. Raises: StateError."""
        return list(self._store.all().values())

    def left(self) -> list[Debt]:
        """The debts whose undos are not under way in this process. Raises: StateError."""
        with self._guard:
            under_way = self._under_way.copy()
        return [debt for debt in self.all() if debt.name not in under_way]

    def outstanding(self) -> list[Debt]:
        """The debts that are left and not void. Raises: StateError."""
        debts = self.left()
        if debts:
            newer = self.set_again()
            debts = [replace(debt, steps=without(debt.steps, newer)) for debt in debts]
        return [debt for debt in debts if debt.steps]

    def set_again(self) -> list[Step]:
        """The steps of all claims that are prepared now. A claim that is only being prepared may have done nothing yet,
        and then undoes nothing. Raises: StateError."""
        return [
            step
            for record in self._records.all().values()
            if record.phase == "prepared" and self._boot_id in (None, record.boot_id)
            for step in record.steps
        ]

    def owing(self) -> Callable[[OfferedDevice], Debt | None]:
        """The debt that keeps a device from being given out, as of now. Debts that cannot be listed count as none."""
        debts: list[Debt] = []
        with suppress(StateError):
            debts = self.outstanding()
        self.shown = {debt.name for debt in debts}
        return lambda device: withholding(debts, device, self._boot_id or "")

    def get(self, name: str) -> Debt | None:
        """A debt as it is now. Raises: StateError."""
        return next((debt for debt in self.all() if debt.name == name), None)

    def lessen(self, debt: Debt, steps: Sequence[Step], cause: str) -> None:
        """These steps are still owed, for this cause; with no steps, the debt is paid. Raises: StateError."""
        if steps:
            with self._guard:
                self._left[debt.name] = (tuple(steps), cause)
        else:
            self.end(debt)
            _log.info("debt_paid", claim=str(debt.record.ref), claim_uid=debt.record.ref.uid, debt=debt.name)
            if self._observer is not None:
                self._observer.paid(debt)
        if tuple(steps) != debt.steps:
            self._changed()

    def tell(self) -> None:
        """Debts have come or gone, whoever did it."""
        self._changed()

    def _debt(self, name: str, record: ClaimRecord) -> Debt | None:
        with self._guard:
            steps, cause = self._left.get(name, (record.steps, None))
        try:
            since = int(self._store.path(name).stat().st_ctime)
        except OSError:  # paid by the other instance just now
            return None
        boot_id = record.boot_id if self._boot_id is None else self._boot_id
        return Debt(name, record, still_owed(steps, record, boot_id), since, cause)


class DebtKeeper:
    """Pays debts: in a thread of its own while `leads` says yes, and before a Prepare that wants a device concerned.

    The thread tries as soon as `tools` answers another value than before (a program, the MPS host or the driver came
    back), and else after pauses that grow.
    """

    def __init__(
        self,
        debts: Debts,
        locks: GpuLocks,
        runner: Undo,
        boot_id: str,
        leads: Callable[[], bool] = lambda: True,
        tools: Callable[[], Hashable] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._debts = debts
        self._locks = locks
        self._runner = runner
        self._boot_id = boot_id
        self._leads = leads
        self._tools = tools
        self._clock = clock
        self._seen_tools: Hashable = None
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_MOST_S)
        self._due = 0.0
        self._is_asked = threading.Event()
        self._hanging: list[tuple[frozenset[str], Future[None]]] = []
        self._told: tuple[set[str], set[str]] | None = None
        self._worker = BackgroundWorker(
            "debt-keeper", self._turn, crash_event="debt_keeper_failed", on_crash=lambda _error: _LOOK_EVERY_S
        )

    def start(self) -> None:
        """Begin to pay."""
        self._worker.start()

    def stop(self) -> None:
        """Stop; a payment under way ends within seconds."""
        self._worker.stop(_STOP_S)

    def look_soon(self) -> None:
        """Debts were made, or something has changed on the node."""
        self._is_asked.set()
        self._worker.wake()

    def pay_all(self) -> list[Debt]:
        """Try to pay every debt now; those that are left. Raises: StateError if the debts cannot be listed."""
        tried: set[str] = set()
        for debt in self._debts.left():
            if self._worker.is_stopping:
                break
            if not self._hangs(debt.gpu_uuids):
                [paid] = side_by_side([partial(self._pay_alone, debt, frozenset(tried))], 1, _HANGS_S)
                if paid.cancelled():  # no thread could start
                    self._pay_alone(debt, frozenset(tried))
                elif paid.done():
                    paid.result()
                else:  # it has the locks of its GPUs, and the others are paid
                    self._hanging.append((debt.gpu_uuids, paid))
                    _log.warning("debt_payment_hangs", debt=debt.name, gpus=sorted(debt.gpu_uuids))
            tried.add(debt.name)
        return self._debts.outstanding()

    def _hangs(self, gpu_uuids: Collection[str]) -> bool:
        self._hanging = [one for one in self._hanging if not one[1].done()]
        return any(not one[0].isdisjoint(gpu_uuids) for one in self._hanging)

    def _pay_alone(self, debt: Debt, tried: Collection[str]) -> None:
        try:
            with self._locks.hold(debt.gpu_uuids, _LOCK_S):
                self._pay(debt.name, tried)
        except DraDriverError as error:
            self._debts.lessen(debt, debt.steps, str(error))

    def _pay(self, name: str, tried: Collection[str]) -> None:
        """Try to pay one debt. The caller holds the locks of its GPUs.

        What one of the debts `tried` before still owes is owed by that one alone: a Prepare that fails again and again
        would else leave a debt each time.
        """
        now = self._debts.get(name)
        if now is None:
            return
        others = [
            one for one in self._debts.all() if one.name in tried and one.record.boot_id == now.record.boot_id
        ]
        due = without(now.steps, [*self._debts.set_again(), *(step for one in others for step in one.steps)])
        self._lessen(now, due, without(now.steps, due))

    def settle(self, devices: Sequence[OfferedDevice], wanted: Sequence[Step], held: HeldGpus) -> None:
        """Pay what is owed on the GPUs of devices that a claim is about to get, but for what its own steps set anyway.
        A MIG device of an ended claim is destroyed all the same: nobody knows what is still in it. `held` are the locks
        of the GPUs. Each GPU has its own thread, so eight that hang take as long as one.

        Raises: RetryableError that tells the debt, if one keeps a device from being used; StateError.
        """
        gpu_uuids = {device.gpu.uuid for device in devices}
        settings = [step for step in wanted if not isinstance(step, CreateMig)]
        owed: list[tuple[frozenset[str], list[tuple[Debt, Sequence[Step]]]]] = []
        for debt in self._debts.all():
            here = [step for step in debt.steps if gpus_of(step, debt.record) & gpu_uuids]
            due = without(without(here, settings), self._debts.set_again()) if here else ()
            if due:
                gpus = frozenset[str]().union(*(gpus_of(step, debt.record) for step in due)) & gpu_uuids
                joined = [lane for lane in owed if lane[0] & gpus]
                owed = [lane for lane in owed if lane not in joined]
                before = [one for _, debts in joined for one in debts]
                owed.append((gpus.union(*(lane[0] for lane in joined)), [*before, (debt, due)]))
        if not owed:
            return
        tasks = [partial(self._settle_each, debts, devices) for _, debts in owed]
        futures = side_by_side(tasks, len(tasks), time_left(_SETTLE_S))
        for (gpus, _), future in zip(owed, futures, strict=True):
            if not future.done():
                held.keep(gpus, future, "a cleanup after an ended claim")
        for (_, debts), future in zip(owed, futures, strict=True):
            if not future.done() or future.cancelled():
                raise RetryableError(f"the device cannot be used yet: {debts[0][0].text}")
            future.result()

    def _settle_each(
        self, owed: Sequence[tuple[Debt, Sequence[Step]]], devices: Sequence[OfferedDevice]
    ) -> None:
        """Pay these steps of debts, one after the other: a step that two debts owe is not tried twice."""
        failed: list[Step] = []
        for debt, steps in owed:
            due = without(steps, failed)
            left = self._lessen(debt, due) if due else []
            failed += left
            owing = replace(debt, steps=tuple(left))
            if any(withholding([owing], device, self._boot_id) for device in devices):
                told = self._debts.get(debt.name) or owing
                raise RetryableError(f"the device cannot be used yet: {told.text}")

    def _lessen(self, debt: Debt, due: Sequence[Step], void: Sequence[Step] = ()) -> list[Step]:
        """Undo these steps of a debt, and forget those that are void; those that could not be undone."""
        left: list[Step] = []
        causes: list[str] = []
        for step in reversed(due):
            try:
                with at_most(UNDO_S):
                    self._runner.undo(step, debt.record)
            except Exception as error:  # noqa: BLE001  a bug in one undo must not keep the others from being tried
                tell_crash(error, debt.record)
                if isinstance(step, RunMps) and debt.record.boot_id != self._boot_id:
                    continue  # the reboot ended the daemon; a directory may be left
                left.insert(0, step)
                causes.append(str(error))
        rest = [step for step in debt.steps if step in left or (step not in due and step not in void)]
        self._debts.lessen(debt, rest, "; ".join(dict.fromkeys(causes)) or debt.cause or "")
        return left

    def _tell_what_is_not_shown(self, names: set[str]) -> None:
        """The other instance of a rolling update makes and pays debts too. Once for each difference: an instance that
        does not publish never shows what it is told."""
        differs = None if names == self._debts.shown else (names, self._debts.shown)
        is_news, self._told = differs is not None and differs != self._told, differs
        if is_news:
            self._debts.tell()

    def _turn(self) -> float:
        is_asked = self._is_asked.is_set()
        self._is_asked.clear()
        try:
            debts = self._debts.left()
            self._tell_what_is_not_shown({debt.name for debt in self._debts.outstanding()})
            if not debts or not self._leads():
                return _LOOK_EVERY_S
            tools = self._tools()
            if tools != self._seen_tools or is_asked:
                self._seen_tools = tools
                self._backoff.reset()
            elif self._clock() < self._due:
                return min(_TOOLS_EVERY_S, max(0.05, self._due - self._clock()))
            if not self.pay_all():
                self._backoff.reset()
                return _LOOK_EVERY_S
        except DraDriverError as error:
            _log.warning("debts_not_paid", reason=str(error))
        self._due = self._clock() + self._backoff.next()
        return _TOOLS_EVERY_S


def tell_crash(error: Exception, record: ClaimRecord) -> None:
    """Log an error of an undo that is a bug, with its traceback; called while the error is handled."""
    if not isinstance(error, DraDriverError):
        _log.exception("undo_crashed", claim_uid=record.ref.uid)


def _names(uid: str) -> Iterable[str]:
    yield uid
    number = 2
    while True:
        yield f"{uid}.{number}"
        number += 1


def _tell(found: UnreadableFile) -> None:
    _log.error(
        "debt_unreadable",
        debt=found.name,
        reason=found.reason,
        kept_as=str(found.kept_as),
        remedy="look at the file, then remove it; a reboot of the node takes back whatever it spoke of",
    )
